"""Reading plain text: a record is what stands between blank lines."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Final

from kubetune.data.reading import record
from kubetune.data.reading.files.packed import opened
from kubetune.data.reading.files.reader import Reader
from kubetune.data.reading.record import Record, decode, lines
from kubetune.data.reading.record_problems import Problems


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


PARAGRAPHS: Final = Reader(read_txt)
