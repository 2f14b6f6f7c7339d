"""Published data sets that need more than another shape: each recipe turns their records into rows for training.

Adding a recipe is one module with a RECIPE and its name in RECIPES. What all of them share: reading and writing whole
or not at all (conversion.py), the files of records (dataset_files.py), images (record_images.py).
"""

from typing import Final

# Names on the command line, and of the modules here.
RECIPES: Final = ("fire", "volcano")
