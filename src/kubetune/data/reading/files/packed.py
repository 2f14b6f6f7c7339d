"""Open data files as bytes: unpack gzip, and recognise by the first bytes what is not UTF-8 text.

`x.jsonl.gz` is read as `x.jsonl`, and so is an `x.jsonl` that is packed in spite of its name, as `datasets` does. Other
formats need libraries that not every Python has, so their files are refused, with the program that unpacks them.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, cast

from kubetune.config.data_files import ending_of, format_beginning, format_of
from kubetune.errors import DataError

_GZIP: Final = b"\x1f\x8b"
# How files of other packers begin, and what unpacks them.
_UNPACKERS: Final = {
    b"BZh": "bunzip2",
    b"\xfd7zXZ": "unxz",
    b"\x28\xb5\x2f\xfd": "unzstd",
    b"PK\x03\x04": "unzip",
}
_LFS_POINTER: Final = b"version https://git-lfs.github.com/spec/"


def opened(file: Path) -> IO[bytes]:
    """Open a file for its bytes, unpacked. Raise DataError where it cannot be opened."""
    try:
        if is_packed(file):
            return cast(IO[bytes], gzip.open(file))
        return open(file, "rb")
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}. Nothing was written.") from error


def is_packed(file: Path) -> bool:
    """True for a file that gzip packed, by its first bytes, since names do not always say it."""
    with open(file, "rb") as stream:
        return stream.read(len(_GZIP)) == _GZIP


@contextmanager
def unpacking(file: Path) -> Iterator[None]:
    """Turn errors of gzip about a damaged file into a DataError, while the block reads the file."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{file} is damaged, or its download incomplete: {error}; see `gzip -t`. Nothing was written."
        ) from error


def why_unreadable(start: bytes, file: Path) -> str | None:
    """Return why a file that begins with these bytes is not UTF-8 text, and what to do; None if it may be text."""
    if start.startswith(_LFS_POINTER):
        # A pointer is a small text with the size and the digest of the file.
        size = re.search(rb"^size (\d+)", start, re.MULTILINE)
        whole = f" of {int(size[1]):,} bytes" if size else ""
        return f"is a pointer of Git LFS in place of a file{whole}; fetch that by `git lfs pull`"

    for magic, unpacker in _UNPACKERS.items():
        if start.startswith(magic):
            return f"is packed; unpack it by `{unpacker} {file.name}`, or pack it by gzip, which is read as it is"
    known = format_beginning(start)
    if known is not None:
        ending, file_format = known
        if ending == ending_of(file):
            return None
        return f"is {file_format.title}; name it {file.stem}{ending}"
    # NULs alone say nothing of an encoding: the reader names the line they are on.
    encoding = json.detect_encoding(start)
    if start.strip(b"\0") and not encoding.startswith("utf-8"):
        name = re.sub("-(?=[BL]E)", "", encoding.upper())  # iconv has UTF-16LE, Python utf-16-le
        return (
            f"is {name}; expected UTF-8: `iconv -f {name} -t UTF-8 {file.name} > utf8-{file.name}`"
        )

    # A carriage return at the end may have its line feed after it.
    has_lone_returns = re.search(rb"\r(?!\n|\Z)", start) is not None and b"\n" not in start
    if has_lone_returns and format_of(file).in_lines:
        return (
            "has lines that end with carriage returns only; expected line feeds: "
            f"`tr '\\r' '\\n' < {file.name} > lines-{file.name}`"
        )
    return None
