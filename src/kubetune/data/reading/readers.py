"""Reading records from a file of any format, each with the line it is on, in bounded memory.

A file's ending decides which reader it has, by the table of config/data_files.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from kubetune.config.data_files import format_of
from kubetune.data.reading.files.packed import opened, unpacking, why_unreadable
from kubetune.data.reading.files.reader import Reader
from kubetune.data.reading.record import Record
from kubetune.data.reading.record_problems import Problems


def read_file(file: Path, problems: Problems) -> Iterator[Record]:
    """Read the records of a file of any format; one with an unknown ending as JSON lines."""
    with unpacking(file):
        with opened(file) as stream:
            # A file that is no text at all gets one problem, not one for each of its lines.
            problem = why_unreadable(stream.read(1024), file)
        if problem is not None:
            problems.add(f"{file}:1", problem)
            return
        yield from reader_of(file).read(file, problems)


def reader_of(file: Path) -> Reader:
    """Return the reader of a file, by its ending."""
    module, name = format_of(file).reader.split(".")
    reader = getattr(import_module(f"kubetune.data.reading.files.{module}"), name)
    assert isinstance(reader, Reader)
    return reader


def count_records(file: Path) -> int:
    """Return the number of records of a file, bad ones included, without parsing if the format allows that."""
    count = reader_of(file).count
    if count is not None:
        return count(file)
    return sum(1 for _ in read_file(file, Problems()))


def features_of(file: Path) -> dict[str, Any]:
    """Return the account of the columns that `datasets` writes into some files; empty for others."""
    return reader_of(file).features(file)
