"""The reader of one format: functions that read its files and count their records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kubetune.data.reading.record import Record
from kubetune.data.reading.record_problems import Problems
from kubetune.data.reading.strict_json import JsonObject


def _no_features(_: Path) -> JsonObject:
    return {}


@dataclass(frozen=True)
class Reader:
    """Functions for the files of one format, which config/data_files.py names by their ending.

    arrow.py     ARROW = Reader(read_arrow, count=arrow_rows)
    data_files   ".arrow": FileFormat("arrow.ARROW", "an Arrow file", begins=b"ARROW1")
    """

    # Yields the records of a file. A problem is noted for anything that is no record.
    read: Callable[[Path, Problems], Iterator[Record]]
    # The number of records, bad ones included, without parsing; None: a file is read to count them.
    count: Callable[[Path], int] | None = None
    # The account of the columns that `datasets` writes into some files; empty for most.
    features: Callable[[Path], JsonObject] = _no_features
