"""Published data sets that need more than another shape: each recipe turns their records into rows for training.

Adding a recipe is one module with a RECIPE and one line in RECIPES. What all of them share: reading and writing whole
or not at all (conversion.py), the files of records (files.py), images (images.py), turns and their texts (turns.py).
"""

from __future__ import annotations

from typing import Final

# Name on the command line: the module, which is imported on use.
RECIPES: Final = {
    "fire": "kubetune.plugins.recipes.fire",
    "volcano": "kubetune.plugins.recipes.volcano",
}
