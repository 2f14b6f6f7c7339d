"""Endings of data files: the one table for readers, lint, manifests, imported configs and the pages.

A new format is one function in data/reading and one line in READERS. Nothing here opens a file.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Final

READERS: Final = {
    # ending: the module of data/reading and its function that read such a file
    ".jsonl": "json_files.read_jsonl",
    ".ndjson": "json_files.read_jsonl",
    ".json": "json_files.read_json",
    ".csv": "tables.read_csv",
    ".tsv": "tables.read_tsv",
    ".parquet": "tables.read_parquet",
    ".txt": "readers.read_txt",
}
# Ending that may follow one of READERS. `train.jsonl.gz` is read without unpacking it first.
GZIP: Final = ".gz"

# Endings of packers that not every Python has. Such files are refused with the advice to unpack them.
PACKED: Final = (".bz2", ".xz", ".zst", ".zip")

# Endings of record files that no reader is for. In a folder of data they are refused, not skipped.
OTHER_RECORDS: Final = (
    ".arrow", ".avro", ".feather", ".jsonlines", ".orc", ".tar", ".tgz", ".xlsx",
)  # fmt: skip

# Endings of files without records. A name with one of them is a file, never a data set of the hub.
OTHER_TEXTS: Final = (".html", ".md", ".yaml", ".yml")

_HUB_ID: Final = re.compile(r"(\w[\w.-]*(?:/\w[\w.-]*)?)(?:#\d+)?")


def ending_of(path: str | PurePath) -> str:
    """Return the ending that says how a file is read: `.jsonl` for `x.JSONL` and for `x.jsonl.gz`."""
    path = PurePath(path)
    # `x.jsonl.gz`: the ending before .gz counts.
    ending = path.suffix.lower()
    if ending == GZIP:
        ending = PurePath(path.stem).suffix.lower()
    return ending


def is_read(path: str | PurePath) -> bool:
    """True if there is a reader for files with this ending."""
    return ending_of(path) in READERS


def is_packed_otherwise(path: str | PurePath) -> bool:
    """True for a file that is packed by something else than gzip."""
    return PurePath(path).suffix.lower() in PACKED


def is_file_name(path: str | PurePath) -> bool:
    """True for the name of a file, one that is read or one that is refused. Other names may be on the hub."""
    others = (GZIP, *PACKED, *OTHER_RECORDS, *OTHER_TEXTS)
    return is_read(path) or PurePath(path).suffix.lower() in others


def is_hub_id(path: str) -> bool:
    """True if a path of a model or of data may be a name on the hub: NAME or OWNER/NAME, perhaps with `#500`."""
    name = _HUB_ID.fullmatch(path)
    return name is not None and not is_file_name(name[1])


def readable_endings() -> str:
    """Return the endings that are read, as messages list them."""
    return f"{', '.join(READERS)}, or one of these packed by gzip ({GZIP})"
