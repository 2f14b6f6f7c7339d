"""Published data sets that need more than another shape: each recipe turns their records into rows for training.

Adding a recipe is one module with a RECIPE and one line in RECIPES. What all of them share: reading and writing whole
or not at all (conversion.py), where records come from (origin.py), what became of records (tally.py).
"""

from __future__ import annotations

from typing import Final

RECIPES: Final = {
    "fire": "kubetune.plugins.recipes.fire",
    "volcano": "kubetune.plugins.recipes.volcano",
}
"""Name on the command line to module, imported on use."""
