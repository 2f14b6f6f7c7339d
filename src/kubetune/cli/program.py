"""How the user's shell finds this program, for commands that are printed to be pasted."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from kubetune.base.humanize import shell_word


def program() -> str:
    """Return how the user calls kubetune: by its name if the shell finds this one, else by its path.

    `kubetune` in an environment that is entered, `.venv/bin/kubetune` in one that is not, and
    `.venv/bin/python -m kubetune` where the package is not installed.
    """
    beside = Path(sys.executable).with_name("kubetune")
    named = shutil.which("kubetune")
    if named is not None and (not beside.exists() or os.path.samefile(named, beside)):
        return "kubetune"
    if beside.exists():
        return shell_word(_shortest(beside))
    return f"{shell_word(_shortest(Path(sys.executable)))} -m kubetune"


def _shortest(path: Path) -> str:
    """Return a path from the current folder if it lies below it, else the whole path."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
