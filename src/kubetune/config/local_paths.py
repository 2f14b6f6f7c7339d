"""Keys whose value may be a file or folder of this machine, and where such a file is."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from kubetune.base.provenance import Entry, KeyPath, Problem, dotted, texts_in
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
# Keys whose value is a place here, whether or not there is something already.
_PLACES: Final[frozenset[KeyPath]] = frozenset((
    *LOCAL_PATHS, ("output",), ("rewards",), ("data", "cache"), ("logging", "report_json"), ("distill", "teacher"),
    ("evaluation", "benchmarks", "tasks_folder"), ("tracking", "trackio", "dir"),
))  # fmt: skip
# Keys of a source or a reward whose value is one.
_INNER_PLACES: Final = ("path", "file", "reward_model", "teacher")


def with_known_homes(entries: Iterable[Entry], problems: list[Problem]) -> Iterator[Entry]:
    """Yield the entries. A place in the home of a user who is not known here is a problem: `~models/qwen` for `~/models`."""
    for entry in entries:
        places = []
        if entry.path in _PLACES or entry.path[:-1] in _PLACES:
            places = [
                text for inner, text in texts_in(entry.value) if _is_place((*entry.path, *inner))
            ]
        strange = [text for text in places if os.path.expanduser(text).startswith("~")]
        for text in strange:
            problems.append(
                Problem(
                    entry.origin,
                    f"{dotted(entry.path)}: {text} is in the home of a user who is not known here; expected ~/… for "
                    "your own, or a whole path",
                )
            )
        if not strange:
            yield entry


def _is_place(path: KeyPath) -> bool:
    """True for a key of a place, an item of its list, and for those of a source or a reward that are places."""
    return path in _PLACES or isinstance(path[-1], int) or path[-1] in _INNER_PLACES


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
