"""A copy of the package, to which a test adds something as an engineer would: a file, a line in a table."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import kubetune


def copy_package(folder: Path) -> Path:
    """Copy the package into a folder, and return where it lies there."""
    return shutil.copytree(
        Path(kubetune.__file__).parent,
        folder / "kubetune",
        ignore=shutil.ignore_patterns("__pycache__"),
    )


def put_before(file: Path, mark: str, text: str) -> None:
    """Write a text in front of a mark that the file has once."""
    old = file.read_text()
    assert old.count(mark) == 1
    file.write_text(old.replace(mark, text + mark))


def run_script(folder: Path, script: str) -> str:
    """Run a script with the copy in a folder, there, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
