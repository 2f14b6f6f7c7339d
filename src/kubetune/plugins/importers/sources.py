"""Sources of data in other tools' files: each is a section with a table of its own, read by the same engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kubetune.plugins.importers.engine import Draft, Row

# Names of readers of `datasets`, which stand where a path usually does; the files are named beside them.
_GENERIC = ("json", "csv", "parquet", "text", None)
# Keys of a source as people write them, and what they are where they are left out.
_ORDER = ("path", "format", "subset", "split", "weight", "columns")
_DEFAULTS: dict[str, Any] = {"split": "train", "weight": 1, "columns": {}}

SUBSET_AND_SPLIT = [Row("name subset", "subset"), Row("split", "split")]


def take_files(section: Draft) -> None:
    """Take `path` and `data_files` together: which of them names the data follows from both.

    path: json         data_files: a.jsonl    the data are a.jsonl
    path: owner/set    data_files: a.jsonl    the data are owner/set, and data_files is dropped
    path: owner/set                           the data are owner/set
    """
    path = section.take("path")
    files = section.take("data_files")
    is_generic = path in _GENERIC
    if files is None:
        if path is not None:
            section.carry("path", "path", str(path))
        return
    if not isinstance(files, list):
        files = [files]
    if len(files) > 1 or not is_generic:
        shown = section.get("data_files")
        why = f"one file or pattern a source: {shown}; write a source for each file"
        section.drop("data_files", why)
    if is_generic:
        section.carry("data_files", "path", str(files[0]))
    else:
        section.carry("path", "path", str(path))


def finished(draft: Draft, section: Draft, rows: Iterable[Row]) -> dict[str, Any]:
    """Send the section's other keys to their rows, hand its notes to the draft, and return the source.

    What was carried over gets no note of its own: the source shows it.
    """
    section.apply(rows, "sources have no such setting")
    for note in section.notes:
        if note.kind != "carried":
            draft.notes.append(note)
    return tidy(section.settings)


def tidy(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return a source in the usual order, without what it says by default."""
    tidied = {}
    for key in _ORDER:
        value = source.get(key)
        if key == "columns" and value:
            # `columns: {text: text}` says nothing.
            value = {ours: theirs for ours, theirs in value.items() if ours != theirs}
        if value not in (None, _DEFAULTS.get(key)):
            tidied[key] = value
    return tidied
