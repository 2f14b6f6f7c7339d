"""Keys whose value may be a file or folder of this machine, and where such a file is."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kubetune.base.provenance import (
    Entry,
    KeyPath,
)
from kubetune.config.schema.distill import ITSELF

# Keys whose value may be a local file or folder, as text or under `path` of a source.
LOCAL_PATHS: tuple[KeyPath, ...] = (
    ("model", "path"),
    ("model", "tokenizer"),
    ("model", "chat_template"),
    ("data", "train"),
    ("data", "eval"),
    ("evaluation", "metrics", "file"),
    ("evaluation", "forget", "data"),
    ("evaluation", "forget"),
)


def with_absolute_paths(entries: Iterable[Entry], folders: Sequence[Path]) -> Iterator[Entry]:
    """Yield the entries. Local paths that exist, alone or below one of `folders`, are made absolute."""
    for entry in entries:
        is_local = any(entry.path in (known, (*known, "path")) for known in LOCAL_PATHS)
        if is_local or (entry.path == ("distill", "teacher") and entry.value != ITSELF):
            yield replace(entry, value=_find(entry.value, folders))
        elif entry.path == ("rewards",):
            yield replace(entry, value=_with_absolute_files(entry.value, folders))
        else:
            yield entry


def _with_absolute_files(rewards: Any, folders: Sequence[Path]) -> Any:
    """Return rewards whose files and models have their absolute paths if they exist; other names stay."""
    if isinstance(rewards, list):
        return [_with_absolute_files(reward, folders) for reward in rewards]
    if not isinstance(rewards, dict):
        return rewards
    changed = dict(rewards)
    for key in ("file", "reward_model", "teacher"):
        if isinstance(rewards.get(key), str):
            changed[key] = _find(rewards[key], folders)
    return changed


def _find(value: Any, folders: Sequence[Path]) -> Any:
    """Return a path, or a source or list of sources with its paths, made absolute if the file exists."""
    if isinstance(value, list):
        return [_find(item, folders) for item in value]
    if isinstance(value, dict) and "path" in value:
        return {**value, "path": _find(value["path"], folders)}
    if not isinstance(value, str) or "://" in value or "\0" in value:
        return value
    # `train.jsonl#500`: a file of the whole name goes first, since # is valid in a name.
    path, mark, count = value.rpartition("#")
    for folder in folders:
        whole = _below(folder, value)
        if whole is not None:
            return whole
        if mark and count.isdecimal():
            file = _below(folder, path)
            if file is not None:
                return f"{file}#{count}"
    return value


def _below(folder: Path, name: str) -> str | None:
    """Return the absolute path of a file, a folder or a pattern with matches. None if there is none."""
    if not name:
        return None
    place = folder / Path(name).expanduser()
    is_pattern = any(char in name for char in "*?[")
    if place.exists() or (is_pattern and glob.glob(str(place), recursive=True)):
        return os.path.normpath(place)
    return None
