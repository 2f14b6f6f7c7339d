"""Folders that appear whole or not at all: written aside, listed with checksums, made durable, named by rename."""

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
    """A hidden folder that becomes `final` when the block ends well, durable, and vanishes when it does not.

    A former `final` is gone once the new one has its name, unless `set_aside` keeps it under another. `what` names
    the points where a test can break this; `explained` turns the system's refusals into faults.
    """
    partial, former = temporary_sibling(final), temporary_sibling(final)
    try:
        with explained(final):
            partial.mkdir()
            yield partial
            _fsync_tree(partial)
            fault_injection.reach(f"{what}.sealed")
            if final.exists():
                set_aside(final) if set_aside else os.rename(final, former)
            os.rename(
                partial, final
            )  # at once, not after the former one was deleted: a kill would leave neither
            fault_injection.reach(f"{what}.renamed")
            fsync_folder(final.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(former, ignore_errors=True)


def _fsync_tree(folder: Path) -> None:
    """Make every file below a folder durable, and every name in it."""
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            fsync_folder(path)
        else:
            with open(path, "rb") as file:
                os.fsync(file.fileno())


def remove(path: StrPath) -> None:
    """Delete a folder, or what lies in its place. It is renamed first, so that no moment shows it half deleted."""
    doomed = temporary_sibling(path)
    with explained_writes(path), contextlib.suppress(FileNotFoundError):
        os.rename(path, doomed)
        fault_injection.reach("remove")
        if doomed.is_dir() and not doomed.is_symlink():
            shutil.rmtree(doomed)
        else:
            doomed.unlink()


def remove_leftovers(parent: Path, name: str | None = None) -> None:
    """Delete what killed processes left half written or half deleted of a name, or of all. Only for a lock's holder."""
    for leftover in parent.glob(f".{glob.escape(name)}.*.tmp" if name else ".*.tmp"):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink()


def remove_abandoned(folder: Path) -> None:
    """Delete files of a folder that killed processes left half written. Others may be writing there."""
    for leftover in folder.glob(".*.tmp"):
        if leftover.is_file() and not leftover.is_symlink() and is_abandoned(leftover):
            leftover.unlink(missing_ok=True)


def contents(folder: Path, but: str = "") -> dict[str, Path]:
    """Every file below a folder by its path in it, in order, `but` one."""
    found = {
        str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()
    }
    return {name: path for name, path in found.items() if name != but}


def checksums(folder: Path, but: str = "") -> dict[str, Any]:
    """Sizes and SHA-256 of the files of a folder, as its manifest has them; `but` one, the manifest itself."""
    return {
        name: {"sha256": sha256_file(path), "bytes": path.stat().st_size}
        for name, path in contents(folder, but).items()
    }


def is_whole(folder: Path, manifest: str, *, thorough: bool = False) -> bool:
    """Every file that a manifest's `files` names has its size and, if `thorough`, its checksum."""
    try:
        listed: dict[str, Any] = json.loads(read_inside(folder / manifest))["files"]
        return all(
            os.stat(require_inside(folder / name, folder)).st_size == facts["bytes"]
            and (not thorough or sha256_file(folder / name) == facts["sha256"])
            for name, facts in listed.items()
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False


def damage(
    folder: Path,
    listed: Mapping[str, Any],
    *,
    but: str = "",
    digest: Callable[[Path], str] = sha256_file,
) -> str | None:
    """Return what differs between a folder and the sizes and checksums that its manifest lists, None if nothing does.

    `but` names the manifest itself. `digest` returns the SHA-256 of a file, where some are known already.
    """
    present = contents(folder, but)
    if missing := sorted(listed.keys() - present.keys()):
        return f"lacks {', '.join(missing)}"
    if foreign := sorted(present.keys() - listed.keys()):
        return f"holds {', '.join(foreign)}, which its manifest does not name"
    for name, path in present.items():
        size = path.stat().st_size
        if size != listed[name]["bytes"]:
            return f"has {size:,} bytes instead of {listed[name]['bytes']:,} in {name}"
        if digest(path) != listed[name]["sha256"]:
            return f"has damage in {name} (its checksum differs)"
    return None


def share_like(folder: Path, example: Path) -> None:
    """Give every file below a folder the mode of one that was made the usual way.

    safetensors makes its files for their owner alone, so that another user of a shared disk could not read the weights.
    Disks that know no modes are left as they are.
    """
    mode = example.stat().st_mode
    for path in contents(folder).values():
        if path.stat().st_mode != mode:
            with contextlib.suppress(OSError):
                path.chmod(stat.S_IMODE(mode))
