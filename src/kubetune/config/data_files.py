"""Endings of data files: the one table for readers, lint, manifests, imported configs and the pages.

A new format is one file in data/reading/files and one line in FORMATS. Nothing here opens a file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final


@dataclass(frozen=True)
class FileFormat:
    """How files with one ending are read."""

    # The module of data/reading/files and the name of its `Reader`.
    reader: str
    # What such a file is called in messages.
    title: str
    # The first bytes of files that are not text.
    begins: bytes = b""
    # False for text whose line breaks mean nothing.
    in_lines: bool = True


FORMATS: Final = {
    ".jsonl": FileFormat("json_files.LINES", "a file of JSON lines"),
    ".ndjson": FileFormat("json_files.LINES", "a file of JSON lines"),
    ".json": FileFormat("json_files.LIST", "a JSON file", in_lines=False),
    ".csv": FileFormat("delimited.COMMAS", "a table"),
    ".tsv": FileFormat("delimited.TABS", "a table"),
    ".parquet": FileFormat("parquet.PARQUET", "a Parquet file", begins=b"PAR1", in_lines=False),
    ".txt": FileFormat("plain_text.PARAGRAPHS", "a text file"),
}
# Ending that may follow one of FORMATS. `train.jsonl.gz` is read without unpacking it first.
GZIP: Final = ".gz"

# Endings of packers that not every Python has. Such files are refused with the advice to unpack them.
PACKED: Final = (".bz2", ".xz", ".zst", ".zip")

# Further endings of files of records. In a folder of data, those that no reader is for are refused, not skipped.
OTHER_RECORDS: Final = (
    ".arrow", ".avro", ".feather", ".jsonlines", ".orc", ".tar", ".tgz", ".xlsx",
)  # fmt: skip

# Endings of files without records. A name with one of them is a file, never a data set of the hub.
OTHER_TEXTS: Final = (".html", ".md", ".yaml", ".yml")

_HUB_ID: Final = re.compile(r"(\w[\w.-]*(?:/\w[\w.-]*)?)(?:#\d+)?")


def without_sample(path: str) -> str:
    """Return the path that a source names: `train.jsonl` for `train.jsonl#64`, its first 64 records."""
    return re.sub(r"#\d+$", "", path)


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
    return ending_of(path) in FORMATS


def format_of(path: str | PurePath) -> FileFormat:
    """Return how a file is read; one with an unknown ending as JSON lines."""
    return FORMATS.get(ending_of(path), FORMATS[".jsonl"])


def format_beginning(start: bytes) -> tuple[str, FileFormat] | None:
    """Return the format, with its ending, of files that begin with these bytes; None for text."""
    for ending, file_format in FORMATS.items():
        if file_format.begins and start.startswith(file_format.begins):
            return ending, file_format
    return None


def holds_other_records(path: str | PurePath) -> bool:
    """True for a file of records that no reader is for."""
    return not is_read(path) and PurePath(path).suffix.lower() in OTHER_RECORDS


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
    return f"{', '.join(FORMATS)}, or one of these packed by gzip ({GZIP})"
