"""How the user's shell finds this program, for commands that are printed to be pasted."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
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


def next_steps(run_dir: Path, task: str) -> str:
    """Return the commands that make sense after a run that ended well."""
    verb = "chat"
    if task in ("sequence_classification", "reward_model"):
        verb = "generate"
    return next_commands((verb, "report", "export"), run_dir)


def next_commands(verbs: Sequence[str], run_name: object) -> str:
    """Return command lines about one run, folder or file: in one line, or below each other on a narrow terminal."""
    commands = [f"{program()} {verb} {shell_word(run_name)}" for verb in verbs]
    line = f"Next: {' · '.join(commands)}"
    if sys.stdout.isatty() and len(line) > shutil.get_terminal_size().columns:
        return "Next: " + "\n      ".join(commands)
    return line


def _shortest(path: Path) -> str:
    """Return a path from the current folder if it lies below it, else the whole path."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
