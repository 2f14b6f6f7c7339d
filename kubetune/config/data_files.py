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
GZIP: Final = ".gz"
"""Files with one of these endings and this one behind it are read as they are: `train.jsonl.gz`."""

PACKED: Final = (".bz2", ".xz", ".zst", ".zip")
"""Endings of packers that Python has not everywhere; such files are refused with the advice to unpack them."""

OTHER_RECORDS: Final = (
    ".arrow", ".avro", ".feather", ".jsonlines", ".orc", ".tar", ".tgz", ".xlsx",
)  # fmt: skip
"""Endings of files of records that nothing here reads; in a folder of data they are refused, not passed over."""

OTHER_TEXTS: Final = (".html", ".md", ".yaml", ".yml")
"""Endings of files that hold no records, and that no data set of the hub has."""

_HUB_ID: Final = re.compile(r"(\w[\w.-]*(?:/\w[\w.-]*)?)(?:#\d+)?")


def ending_of(path: str | PurePath) -> str:
    """Return the ending that says how a file is read: `.jsonl` of `x.JSONL` and of `x.jsonl.gz`."""
    path = PurePath(path)
    ending = path.suffix.lower()
    if ending == GZIP:
        ending = PurePath(path.stem).suffix.lower()
    return ending


def is_read(path: str | PurePath) -> bool:
    """True if the ending of a file is one that a reader is for."""
    return ending_of(path) in READERS


def is_packed_otherwise(path: str | PurePath) -> bool:
    """True for a name that another packer than gzip gives."""
    return PurePath(path).suffix.lower() in PACKED


def is_file_name(path: str | PurePath) -> bool:
    """True for a name that a file has and no data set of the hub, whether the file is read or refused."""
    others = (GZIP, *PACKED, *OTHER_RECORDS, *OTHER_TEXTS)
    return is_read(path) or PurePath(path).suffix.lower() in others


def is_hub_id(path: str) -> bool:
    """True if a path of a model or of data can be a name on the hub: NAME or OWNER/NAME, with `#500` or without."""
    name = _HUB_ID.fullmatch(path)
    return name is not None and not is_file_name(name[1])


def readable_endings() -> str:
    """Return the endings that are read, as messages list them."""
    return f"{', '.join(READERS)}, or one of these packed by gzip ({GZIP})"
