"""Folders that appear whole or not at all: written under a hidden name, flushed to disk, then renamed."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from kubetune.base import fault_injection
from kubetune.base.files import (
    StrPath,
    explained_writes,
    fsync_folder,
    is_abandoned,
    read_inside,
    require_inside,
    sha256_file,
    temporary_sibling,
)


@contextlib.contextmanager
def written(
    final: Path,
    what: str,
    *,
    set_aside: Callable[[Path], Any] | None = None,
    explained: Callable[[Path], AbstractContextManager[None]] = explained_writes,
) -> Iterator[Path]:
    """Yield a hidden folder that becomes `final` when the block ends, and vanishes if the block raises.

        .final.1a2b.tmp  ← written, flushed
        final            → .final.3c4d.tmp     (the former folder, if there is one)
        .final.1a2b.tmp  → final
        .final.3c4d.tmp  is deleted

    `set_aside` keeps the former folder under another name instead. `what` names the points at which a test can break
    this. `explained` turns errors of the system into faults with advice.
    """
    partial = temporary_sibling(final)
    former = temporary_sibling(final)
    try:
        with explained(final):
            partial.mkdir()
            yield partial

            # Content first, then the name.
            _fsync_tree(partial)
            fault_injection.reach(f"{what}.sealed")

            # A folder cannot be renamed onto another one that holds something.
            if final.exists():
                if set_aside is not None:
                    set_aside(final)
                else:
                    os.rename(final, former)

            # Before the former folder is deleted: else a kill meanwhile would leave neither.
            os.rename(partial, final)
            fault_injection.reach(f"{what}.renamed")
            fsync_folder(final.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(former, ignore_errors=True)


def _fsync_tree(folder: Path) -> None:
    """Make every file and every name below a folder durable."""
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            fsync_folder(path)
        else:
            with open(path, "rb") as file:
                os.fsync(file.fileno())


def remove(path: StrPath) -> None:
    """Delete a folder or file. It is renamed first, so that nobody ever sees it half deleted."""
    doomed = temporary_sibling(path)
    with explained_writes(path), contextlib.suppress(FileNotFoundError):
        os.rename(path, doomed)
        fault_injection.reach("remove")
        if doomed.is_dir() and not doomed.is_symlink():
            shutil.rmtree(doomed)
        else:
            doomed.unlink()


def remove_leftovers(parent: Path, name: str | None = None) -> None:
    """Delete what killed processes left half written or half deleted, of one name or of all.

    Only for the holder of a lock: nobody else may be writing in `parent`.
    """
    # The names that `temporary_sibling` makes.
    pattern = ".*.tmp"
    if name:
        pattern = f".{glob.escape(name)}.*.tmp"
    for leftover in parent.glob(pattern):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink()


def remove_abandoned(folder: Path) -> None:
    """Delete the files that killed processes left half written in a folder. Others may be writing there meanwhile."""
    for leftover in folder.glob(".*.tmp"):
        if leftover.is_file() and not leftover.is_symlink() and is_abandoned(leftover):
            leftover.unlink(missing_ok=True)


def contents(folder: Path, but: str = "") -> dict[str, Path]:
    """Return every file below a folder by its relative path, sorted. `but` is left out."""
    files = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if name != but and path.is_file():
            files[name] = path
    return files


def checksums(folder: Path, but: str = "") -> dict[str, Any]:
    """Return size and SHA-256 of every file of a folder, for its manifest. `but`, the manifest itself, is left out."""
    facts = {}
    for name, path in contents(folder, but).items():
        facts[name] = {"sha256": sha256_file(path), "bytes": path.stat().st_size}
    return facts


def is_whole(folder: Path, manifest: str, *, thorough: bool = False) -> bool:
    """True if every file that a manifest lists has its size and, if `thorough`, its checksum."""
    try:
        listed: dict[str, Any] = json.loads(read_inside(folder / manifest))["files"]
        for name, facts in listed.items():
            # A manifest that somebody else wrote may name files outside of its folder.
            real = require_inside(folder / name, folder)
            if os.stat(real).st_size != facts["bytes"]:
                return False
            if thorough and sha256_file(folder / name) != facts["sha256"]:
                return False
    # A damaged manifest may have any form.
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False
    return True


def damage(
    folder: Path,
    listed: Mapping[str, Any],
    *,
    but: str = "",
    digest: Callable[[Path], str] = sha256_file,
) -> str | None:
    """Return how a folder differs from the sizes and checksums that its manifest lists. None if it does not.

    `but` names the manifest itself. `digest` returns the SHA-256 of a file; some callers know it already.
    """
    present = contents(folder, but)
    # Names first, then content.
    problem = wrong_names(present, listed)
    if problem:
        return problem
    for name, path in present.items():
        size = path.stat().st_size
        # The size first, since it costs nothing.
        if size != listed[name]["bytes"]:
            return f"has {size:,} bytes instead of {listed[name]['bytes']:,} in {name}"
        if digest(path) != listed[name]["sha256"]:
            return f"has damage in {name} (its checksum differs)"
    return None


def wrong_names(present: Mapping[str, Path], listed: Mapping[str, Any]) -> str | None:
    """Return which files a manifest lists that are not there, or does not list; None if there are none such."""
    missing = sorted(listed.keys() - present.keys())
    if missing:
        return f"lacks {', '.join(missing)}"
    foreign = sorted(present.keys() - listed.keys())
    if foreign:
        return f"holds {', '.join(foreign)}, which its manifest does not name"
    return None


def share_like(folder: Path, example: Path) -> None:
    """Give every file below a folder the permissions of `example`, which was made the usual way.

    safetensors makes files that only their owner can read, so another user of a shared disk could not read the weights.
    A file system without permissions is left as it is.
    """
    mode = example.stat().st_mode
    for path in contents(folder).values():
        if path.stat().st_mode != mode:
            with contextlib.suppress(OSError):
                path.chmod(stat.S_IMODE(mode))
