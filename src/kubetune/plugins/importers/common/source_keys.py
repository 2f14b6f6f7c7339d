"""Sources of data in other tools' files, and the share of their rows that is held out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kubetune.plugins.importers.engine import (
    OFF,
    Draft,
    Outcome,
    Row,
    Table,
    carried,
    dropped,
    near,
    unneeded,
)
from kubetune.plugins.importers.readings import as_list

# Keys of a source as people write them, and what they are where they are left out.
_SOURCE: dict[str, Any] = {
    "path": None, "format": None, "subset": None, "split": "train", "weight": 1, "columns": {},
}  # fmt: skip
# Names of readers of `datasets`, which are where a path usually does; the files are named beside them.
_READERS = ("json", "csv", "parquet", "text", None)


def take_sources(
    draft: Draft, keys: Mapping[str, str], source: Callable[[Draft, str, Any], list[Any]]
) -> None:
    """Take keys of data, each with our path. `source` returns our sources for one item at its place."""
    for key, path in keys.items():
        if key in draft.unknown:
            draft.leave_open(key, path, draft.unknown[key])
            continue
        collected: list[Any] = []
        for number, item in enumerate(as_list(draft.take(key))):
            collected += source(draft, f"{key}[{number}]", item)
        if collected:
            draft.carry(key, path, collected)


def read_source(draft: Draft, section: Draft, table: Table) -> dict[str, Any]:
    """Send a section's keys to their rows, hand its notes to the draft, and return the source.

    What was carried over gets no note of its own: the source shows it.
    """
    section.apply(SOURCE.by_key() | table.by_key())
    draft.notes += [note for note in section.notes if note.kind != "carried"]
    return tidy(section.settings)


def tidy(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a source in the usual order, without what it says by default.

    {"split": "train", "columns.text": "body", "path": "a"}   →   {"path": "a", "columns": {"text": "body"}}
    """
    columns = {}
    for path, theirs in settings.items():
        ours = path.removeprefix("columns.")
        if theirs and ours not in (path, theirs):
            columns[ours] = theirs
    tidied = {}
    for key, default in _SOURCE.items():
        value = columns if key == "columns" else settings.get(key)
        if value not in (None, default):
            tidied[key] = value
    return tidied


def _data_files(value: Any, draft: Draft) -> Outcome:
    """Take the files of a source, if its `path` is only the name of a reader such as `json`.

    path: json         data_files: a.jsonl    the data are a.jsonl
    path: owner/set    data_files: a.jsonl    the data are owner/set, and data_files is dropped
    """
    files = [str(file) for file in as_list(value)]
    why = f"one file or pattern a source: {', '.join(files)}; write a source for each file"
    if draft.get("path") not in _READERS:
        return dropped(why)
    return carried(files[0]) if len(files) == 1 else near(files[0], why)


def _path(value: Any, draft: Draft) -> Outcome:
    """Take the path of a source, unless it is only the name of a reader."""
    if value in _READERS and draft.get("data_files") is not None:
        return unneeded("data_files names the data")
    return carried(str(value))


def share(value: Any, draft: Draft) -> Outcome:
    """Carry the share that is held out for evaluation. A number of rows is no share before the rows are counted."""
    if value == 0:
        return OFF
    if draft.has("data.eval"):
        return unneeded(f"{draft.origin('data.eval')} names the data of evaluations")
    if isinstance(value, (int, float)) and 0 < value < 1:
        return carried(float(value))
    return near(0.05, "kubetune holds out a share, not a number of rows; adjust it")


# Keys of a source that several tools have.
SOURCE = Table(
    same={"subset": "name subset config", "split": "split"},
    rows=[
        Row("path", "path", other=_path),
        Row("data_files", "path", other=_data_files),
        Row("weight", "weight", other=lambda value, _: carried(float(value))),
    ],
)
