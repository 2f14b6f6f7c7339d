"""Python files under the names of all modules there are: each tells when it is imported."""

from __future__ import annotations

import sys
from collections.abc import Collection
from importlib.metadata import packages_distributions
from pathlib import Path


def plant_modules(folder: Path, but: Collection[str] = ()) -> Path:
    """Fill a folder with modules named like all there are `but` some; returns their canary.

    The canary is a file with the names of those that were run, absent while there are none.
    """
    canary = folder / "imported.txt"
    bomb = f"with open({str(canary)!r}, 'a') as canary:\n    canary.write(__name__ + '\\n')\n"
    names = {*sys.stdlib_module_names, *packages_distributions()} - {
        *sys.builtin_module_names,
        "__main__",
        *but,
    }
    for name in names:
        if name.isidentifier():
            (folder / f"{name}.py").write_text(bomb)
    return canary
