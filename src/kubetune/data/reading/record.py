"""One record of a data file, and the lines that files of text are read by, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, Final

# A longer line is taken for a mistake, a file without line breaks, and is never held in memory.
MAX_RECORD_BYTES: Final = 32 * 2**20

# Bytes that are read at once where there are no lines.
BLOCK: Final = 2**20


@dataclass(frozen=True, slots=True)
class Record:
    """One record and the place it came from."""

    file: str
    line: int  # from 1; in Parquet files and data sets of the hub, the row
    value: dict[str, Any]

    @property
    def where(self) -> str:
        """`file:line`, as errors name it."""
        return f"{self.file}:{self.line}"


def lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield lines with their line breaks; of a line that is too long only the beginning."""
    while line := stream.readline(MAX_RECORD_BYTES + 1):
        # The rest of a line that is too long is read and thrown away, so that the next line begins where it does.
        if len(line) > MAX_RECORD_BYTES:
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = stream.readline(BLOCK)
        yield line


def require_length(line: bytes, expected: str = "") -> None:
    """Raise ValueError for the beginning of a line that is too long. `expected` says what to write instead."""
    if len(line) > MAX_RECORD_BYTES:
        raise ValueError(f"is longer than {MAX_RECORD_BYTES:,} bytes{expected}")


def not_utf8(line: bytes, error: UnicodeDecodeError) -> ValueError:
    """Return the error that names the first byte of a line that is not UTF-8."""
    return ValueError(
        f"is not UTF-8: byte 0x{line[error.start]:02x} at column {error.start + 1}; convert the file, such as by "
        "`iconv -f CP1252 -t UTF-8 FILE > NEW`"
    )


def decode(line: bytes) -> str:
    """Return a line as text. Raise ValueError where it is too long or not UTF-8."""
    # First of all: the beginning of a long line may end within a character.
    require_length(line)
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise not_utf8(line, error) from None
