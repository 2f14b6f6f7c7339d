"""The folder of an export: that it appears whole or not at all, and whether one that is there is whole.

What goes into it is export.py's.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base import fault_injection, files
from kubetune.training.full_disk import explained_full_disk

PROVENANCE = "provenance.json"


def is_whole(folder: Path) -> bool:
    """The folder is an export whose files all have their sizes."""
    try:
        listed: dict[str, Any] = json.loads((folder / PROVENANCE).read_text())["files"]
        return all((folder / name).stat().st_size == facts["bytes"] for name, facts in listed.items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False


def check_place(out: Path) -> None:
    """Raise ConfigError when `out` holds anything but an earlier export, which a new one replaces."""
    if out.exists() and not out.is_dir():
        raise errors.ConfigError(f"{out} is a file; choose a folder with --output. Nothing was written.")
    if out.is_dir() and any(out.iterdir()) and not (out / PROVENANCE).is_file():
        raise errors.ConfigError(f"{out} holds other files; choose another folder with --output. Nothing was written.")


@contextmanager
def written_aside(out: Path) -> Iterator[Path]:
    """A folder that becomes `out` when the block ends well, durable, and vanishes when it does not.

    Only for the holder of the run's export lock: what a killed export left beside `out` is removed.
    """
    for leftover in out.parent.glob(f".{out.name}.*.tmp"):
        shutil.rmtree(leftover)
    partial = files.temporary_sibling(out)
    try:
        with files.explained_writes(out), explained_full_disk(out):
            partial.mkdir(parents=True)
            yield partial
            files.fsync_tree(partial)
            fault_injection.reach("export.written")
            former = files.temporary_sibling(out)
            with suppress(FileNotFoundError):
                os.rename(out, former)
            os.rename(partial, out)  # at once, not after the former one was deleted: a kill would leave neither
            files.fsync_folder(out.parent)
            shutil.rmtree(former, ignore_errors=True)
    except BaseException:
        if partial.exists():
            shutil.rmtree(partial)
        raise


def checksums(folder: Path) -> dict[str, Any]:
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): {"sha256": files.sha256_file(path), "bytes": path.stat().st_size}
        for path in found
    }
