"""Sources of data in other tools' files: each is a section with a table of its own, read by the same engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kubetune.plugins.importers.engine import Draft, Row

_GENERIC = ("json", "csv", "parquet", "text", None)
"""Names of readers of `datasets`, which stand where a path usually does; the files are named beside them."""
_ORDER = ("path", "format", "subset", "split", "weight", "columns")

SUBSET_AND_SPLIT = [Row("name subset", "subset"), Row("split", "split")]


def take_files(section: Draft) -> None:
    """Take `path` and `data_files` together: which of them names the data follows from both."""
    path = section.take("path")
    files = section.take("data_files")
    listed = files if isinstance(files, list) else [files]
    is_generic = path in _GENERIC
    if files is not None and (len(listed) > 1 or not is_generic):
        why = f"one file or pattern a source: {files}; write a source for each file"
        section.drop("data_files", why)
    if files is not None and is_generic:
        section.carry("data_files", "path", str(listed[0]))
    elif path is not None:
        section.carry("path", "path", str(path))


def finished(draft: Draft, section: Draft, rows: Iterable[Row]) -> dict[str, Any]:
    """Send the section's other keys to their rows, hand its notes to the draft, and return the source.

    What was carried over gets no note of its own: the source shows it.
    """
    section.apply(rows, "sources have no such setting")
    draft.notes += [note for note in section.notes if note.kind != "carried"]
    return tidy({name: section.ours(name) for name in _ORDER})


def tidy(source: dict[str, Any]) -> dict[str, Any]:
    """Return a source without what it says by default."""
    columns = source.get("columns") or {}
    columns = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    source = source | {"columns": columns}
    defaults = {"split": "train", "weight": 1, "columns": {}}
    return {key: value for key, value in source.items() if value not in (None, defaults.get(key))}
