"""List the files of a run directory, with their sizes and hashes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from kubetune.rundir import heartbeat

_CHUNK_BYTES = 1024 * 1024


def listing(run_dir: Path, globs: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield an entry for each file and link below a folder, except hidden files and heartbeats.

        {"path": "metrics.jsonl", "size": 812, "sha256": "9f86…"}      a file
        {"path": "checkpoints/last", "link": "step-000020"}            a link
        {"path": "pipe"}                                               neither

    With `globs` only those that match one; without, all but the checkpoints that are neither `best` nor `last`.
    """
    checkpoints = run_dir / "checkpoints"
    chosen = set()
    for name in ("best", "last"):
        if (checkpoints / name).is_symlink():
            chosen.add((checkpoints / name).resolve().name)

    for folder, folders, names in os.walk(run_dir):
        parent = Path(folder)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        # os.walk lists links to folders among the folders, and does not enter them.
        links = [name for name in folders if (parent / name).is_symlink()]
        if parent == checkpoints and chosen and not globs:
            folders[:] = [name for name in folders if name in chosen]
        for path in sorted(parent / name for name in (*names, *links)):
            relative = str(path.relative_to(run_dir))
            is_hidden = path.name.startswith(".") or path.suffix == ".lock"
            is_beat = fnmatch(path.name, heartbeat.BEATS)
            if is_hidden or is_beat or not _matches(relative, globs):
                continue
            if path.is_symlink():
                yield {"path": relative, "link": os.readlink(path)}
            elif path.exists() and not path.is_file():
                yield {"path": relative}
            else:
                yield from _file_entry(path, relative)


def _matches(path: str, globs: Sequence[str]) -> bool:
    """True if a path, or a folder that it is in, matches one of the globs, or there are none."""
    if not globs:
        return True
    return any(fnmatch(path, glob) or fnmatch(path, f"{glob}/*") for glob in globs)


def _file_entry(path: Path, relative: str) -> Iterator[dict[str, Any]]:
    """Yield the entry of a regular file as it is now, though it may grow meanwhile; none when it has just gone."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            left = size
            digest = hashlib.sha256()
            while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
                digest.update(chunk)
                left -= len(chunk)
    except FileNotFoundError:
        return
    yield {"path": relative, "size": size, "sha256": digest.hexdigest()}
