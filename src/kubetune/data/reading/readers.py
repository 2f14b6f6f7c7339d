"""Reading records from a file of any format, each with the line it is on, in bounded memory.

A reader is a function of a file and the problems. It yields records; a line that is no record is noted as a problem and
passed over. A file's ending decides which reader it has, in config/data_files.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import cast

from kubetune.config.data_files import READERS, ending_of
from kubetune.data.reading import record
from kubetune.data.reading.packed import opened, unpacking, why_unreadable
from kubetune.data.reading.problems import Problems
from kubetune.data.reading.record import Record, decode, lines
from kubetune.data.reading.tables import parquet_rows

Reader = Callable[[Path, Problems], Iterator[Record]]


def read_file(file: Path, problems: Problems) -> Iterator[Record]:
    """Read the records of a file of any format; one with an unknown ending as JSON lines."""
    with unpacking(file):
        with opened(file) as stream:
            # A file that is no text at all gets one problem, not one for each of its lines.
            problem = why_unreadable(stream.read(1024), file)
        if problem is not None:
            problems.add(f"{file}:1", problem)
            return
        yield from reader_of(file)(file, problems)


def reader_of(file: Path) -> Reader:
    """Return the reader of a file, by its ending."""
    module, function = READERS.get(ending_of(file), READERS[".jsonl"]).split(".")
    return cast(Reader, getattr(import_module(f"kubetune.data.reading.{module}"), function))


def count_records(file: Path) -> int:
    """Return the number of records of a file, bad ones included, without parsing where the format allows that."""
    reader = READERS.get(ending_of(file))
    # A line is a record, and a Parquet file says how many rows it has. Others have to be read.
    if reader == READERS[".jsonl"]:
        return count_lines(file)
    if reader == READERS[".parquet"]:
        return parquet_rows(file)
    return sum(1 for _ in read_file(file, Problems()))


def count_lines(file: Path) -> int:
    """Return the number of lines that are not blank; a last one without a line break counts."""
    with unpacking(file), opened(file) as stream:
        return sum(not line.isspace() for line in lines(stream))


def read_txt(file: Path, problems: Problems) -> Iterator[Record]:
    """Read plain text, of which every stretch without a blank line is a record with the key `text`.

    So a file without blank lines is one record, and line breaks within a paragraph stay.
    """
    begin = 1  # line that the paragraph begins on
    size = 0  # bytes of the paragraph so far
    texts: list[str] = []  # its lines
    with opened(file) as stream:
        # One more blank line ends the last paragraph.
        for number, line in enumerate(chain(lines(stream), [b""]), 1):
            if line.strip():
                if size == 0:
                    begin = number
                size += len(line)
                # What is too long is not held in memory.
                if size > record.MAX_RECORD_BYTES:
                    texts = []
                    continue
                try:
                    texts.append(_text_of(line, number))
                except ValueError as error:
                    problems.add(f"{file}:{number}", str(error))
                continue

            if size > record.MAX_RECORD_BYTES:
                limit = f"{record.MAX_RECORD_BYTES:,} bytes"
                problems.add(f"{file}:{begin}", f"is longer than {limit} up to the next blank line")
            elif texts:
                yield Record(str(file), begin, {"text": "\n".join(texts)})
            texts = []
            size = 0


def _text_of(line: bytes, number: int) -> str:
    text = decode(line).rstrip("\r\n")
    if "\0" in text:
        raise ValueError(
            f"holds a NUL byte at column {text.index(chr(0)) + 1}; expected UTF-8 text"
        )
    # Only the first line may begin with a byte order mark.
    return text.removeprefix("\ufeff") if number == 1 else text
