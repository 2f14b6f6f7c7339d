"""Append to and read the JSON lines that a run keeps. Damaged lines are skipped, and a warning names them.

A file system that was repaired after a power cut leaves torn lines and runs of NULs. Only those lines are lost: the run
goes on, and pages show the rest. What the lines mean is known elsewhere (rundir/metrics).
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from itertools import chain, compress
from pathlib import Path
from typing import Any, BinaryIO, cast

from pydantic_core import from_json

from kubetune.base import logs
from kubetune.base.files import IrregularFileError, explained_writes, open_inside
from kubetune.errors import EnvironmentFault

Line = dict[str, Any]
IsGood = Callable[[Line], bool]
# Quick test of many objects at once. True only if `IsGood` is true of every one of them.
AreGood = Callable[[list[Any]], bool]

_TAIL_BYTES = 64 * 1024
# Some hundred lines. Their objects stay in the processor's cache.
_CHUNK_BYTES = 48 * 1024
_SHOWN_RANGES = 5
# Bytes at the end of the last line read. A follower compares them to see whether the file was replaced.
_COMPARED_BYTES = 256

_log = logs.family_logger("FILES")
_warned: set[str] = set()


class Appender(FileIO):
    """A file that lines are appended to, each in one write, which no other process can split."""

    def __init__(self, path: Path) -> None:
        with explained_writes(path):
            super().__init__(path, "ab+")
            size = os.fstat(self.fileno()).st_size
            # A torn last line stays, and the next line begins after a newline. To cut it off could cut off a line that
            # another process is writing just now.
            self._is_torn = bool(size) and os.pread(self.fileno(), 1, size - 1) != b"\n"

    def append(self, values: Mapping[str, Any]) -> None:
        """Append one line. Raise EnvironmentFault if the disk is full, which leaves no part of it, or the file is gone.

        JSON has no NaN or infinity: they become null. Floats are written by repr, so reading gives back the same bits.
        """
        finite: dict[str, Any] = {}
        for key, value in values.items():
            is_infinite = isinstance(value, float) and not math.isfinite(value)
            finite[key] = None if is_infinite else value

        line = logs.scrub(json.dumps(finite, allow_nan=False) + "\n").encode()
        if self._is_torn:
            line = b"\n" + line

        with explained_writes(str(self.name)):
            written = self.write(line)
            if written < len(line):
                # The disk filled up in the middle of the line. Half a line would spoil the next one.
                self.truncate(os.fstat(self.fileno()).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.name)
        self._is_torn = False

    def require_place(self) -> None:
        """Raise EnvironmentFault if the file was deleted or moved away: further lines would go nowhere."""
        if os.fstat(self.fileno()).st_nlink == 0 or not os.path.exists(str(self.name)):
            raise EnvironmentFault(
                f"{self.name} was deleted or moved away while the run goes on; put the run directory back, or start "
                "the run again"
            )

    def sync(self) -> None:
        """Make the lines durable."""
        with explained_writes(str(self.name)):
            os.fsync(self.fileno())


def read(
    path: Path, is_good: IsGood = lambda _: True, damaged: list[int] | None = None
) -> Iterator[Line]:
    """Yield the objects of a file's lines. Nothing if the file is missing.

    Lines without an object, or with one for which `is_good` is false, are skipped. `damaged` collects their numbers; a
    warning names them if it is None. A last line without a newline is still being written, so it is left out.
    """
    return chain.from_iterable(read_chunks(path, is_good, damaged))


def read_chunks(
    path: Path,
    is_good: IsGood,
    damaged: list[int] | None = None,
    are_good: AreGood = lambda _: False,
) -> Iterator[list[Line]]:
    """Yield lists of some hundred objects, as `read` finds them. Quicker for millions of lines."""
    return (values for _, values in _chunks(path, is_good, damaged, are_good))


def read_both(path: Path, is_good: IsGood = lambda _: True) -> Iterator[tuple[bytes, Line]]:
    """Yield the bytes of each line with its object, as `read` finds them."""
    for lines, values in _chunks(path, is_good, None):
        yield from zip(lines, values, strict=True)


def _chunks(
    path: Path, is_good: IsGood, damaged: list[int] | None, are_good: AreGood = lambda _: False
) -> Iterator[tuple[list[bytes], list[Line]]]:
    """Yield the good lines of a file and their objects, some hundred at once."""
    wrong: list[int] = []
    try:
        file = open_inside(path)
    except FileNotFoundError:
        return

    first = 1  # number of the chunk's first line
    with file:
        for lines in _whole_lines(file):
            values = _parse_all(lines)
            count = len(lines)
            # One check of all lines, where there is one. Only if it fails each line is looked at.
            if not are_good(values):
                is_fine = [value is not None and is_good(value) for value in values]
                if not all(is_fine):
                    for index, line in enumerate(lines):
                        if not is_fine[index] and line != b"\n":
                            wrong.append(first + index)
                    lines = list(compress(lines, is_fine))
                    values = list(compress(values, is_fine))
            yield lines, cast(list[Line], values)
            first += count

    if damaged is not None:
        damaged += wrong
    elif wrong:
        warn(f"{path}: {describe(wrong)} damaged and left out: no line that kubetune wrote")


class Follower:
    """Reads a file of JSON lines to which another process appends.

    A new start of a run may cut the file short or replace it. The file may also be missing for a while. `offset`: the
    byte to begin at.
    """

    def __init__(self, path: Path, is_good: IsGood = lambda _: True, offset: int = 0) -> None:
        self.path = path
        # True if the last `read` found another file, or a shorter one: it returned the lines of the whole file.
        self.has_begun_anew = False
        # Numbers of the damaged lines that were skipped. Right only if `offset` is 0.
        self.damaged: list[int] = []

        self._is_good = is_good
        self._place = offset  # bytes that were read
        self._inode = -1
        self._before = b""  # the last bytes before _place
        self._count = 0  # lines that were read

    @property
    def unread(self) -> int:
        """Return the bytes that are left to read."""
        try:
            return max(0, self.path.stat().st_size - self._place)
        except OSError:
            return 0

    def read(self) -> Iterator[Line]:
        """Yield the good lines that were appended since the last call. Damaged ones are skipped with a warning."""
        self.has_begun_anew = False
        try:
            file = open_inside(self.path)
        except IrregularFileError as error:
            warn(f"{error}; nothing of it is read")
            return iter(())
        except OSError:
            return iter(())

        # Another file has another inode, and one that was cut is shorter than what was read of it.
        facts = os.fstat(file.fileno())
        is_same = self._inode in (-1, facts.st_ino) and facts.st_size >= self._place
        if is_same:
            # The file may have been cut short and have grown again since. Then other bytes are before the place.
            start = self._place - len(self._before)
            is_same = os.pread(file.fileno(), len(self._before), start) == self._before
        if not is_same:
            self.has_begun_anew = True
            self.damaged = []
            self._place = 0
            self._before = b""
            self._count = 0

        self._inode = facts.st_ino
        file.seek(self._place)
        return self._lines(file)

    def _lines(self, file: BinaryIO) -> Iterator[Line]:
        with file:
            for lines in _whole_lines(file):
                for line, value in zip(lines, _parse_all(lines), strict=True):
                    self._place += len(line)
                    self._before = line[-_COMPARED_BYTES:]
                    self._count += 1
                    if value is not None and self._is_good(value):
                        yield value
                    elif line != b"\n":
                        self.damaged.append(self._count)
                        warn(f"{self.path}: damaged lines are left out: none that kubetune wrote")


def _whole_lines(file: BinaryIO) -> Iterator[list[bytes]]:
    """Yield the lines of a file, some hundred at once. A last line without a newline is left out."""
    while lines := file.readlines(_CHUNK_BYTES):
        if not lines[-1].endswith(b"\n"):
            yield lines[:-1]
            return
        yield lines


def _parse_all(lines: list[bytes]) -> list[Line | None]:
    """Return the object of each line, None for a line without one.

    All lines are parsed by one call, as one list with a 0 between any two of them, which is several times as quick:

        {"step": 1}      →  [{"step": 1},0,{"step": 2}]
        {"step": 2}

    Damaged lines make that list invalid, or give it another form: two halves of an object in neighbouring lines become
    one value, and a line may hold several. Then each line is parsed alone.
    """
    try:
        items = from_json(b"[" + b",0,".join(lines) + b"]")
    except ValueError:
        return [parse(line) for line in lines]
    # The form that undamaged lines give: object, 0, object, 0, object.
    values = items[::2]
    zeros = items[1::2]
    are_objects = all(type(value) is dict for value in values)
    are_zeros = all(type(zero) is int for zero in zeros)
    if len(values) == len(lines) and are_objects and are_zeros:
        return list(values)
    return [parse(line) for line in lines]


def last_lines(path: Path, most_bytes: int, folder: Path | None = None) -> list[bytes]:
    """Return the last whole lines of a file, at most `most_bytes` together. Empty if the file is missing.

    `folder`: the folder that the file must be in, by default its own. Raise as `open_inside` does.
    """
    try:
        with open_inside(path, folder) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most_bytes))
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    # The place where reading began lies within a line, as a rule.
    if size > most_bytes:
        return lines[1:]
    return lines


def tail(path: Path, is_good: IsGood = lambda _: True, most: int | None = None) -> list[Line]:
    """Return the last good lines of a file, `most` at most, in their order."""
    newest_first: list[Line] = []
    for line in reversed(last_lines(path, _TAIL_BYTES)):
        if len(newest_first) == most:
            break
        if line.endswith(b"\n"):
            value = parse(line)
            if value is not None and is_good(value):
                newest_first.append(value)
    return newest_first[::-1]


def newest_with(
    path: Path, keys: Sequence[str], is_good: IsGood = lambda _: True
) -> dict[str, Line | None]:
    """Return for each key the last line of `tail` that has it, or None. Only lines that name the key are parsed.

    A key that ends with `_` stands for all keys that begin so.
    """
    lines = last_lines(path, _TAIL_BYTES)
    return {key: next(_newest_first(lines, key, is_good), None) for key in keys}


def newest_first(path: Path, key: str, is_good: IsGood = lambda _: True) -> Iterator[Line]:
    """Yield the lines of a whole file that have a key, the newest first. `key` is as `newest_with` takes it.

    Whoever stops early has read no more of the file than was needed.
    """
    with suppress(FileNotFoundError), open_inside(path) as file:
        end = file.seek(0, os.SEEK_END)
        cut = b""  # end of the line that begins before the block
        while end:
            start = max(0, end - _TAIL_BYTES)
            file.seek(start)
            lines = (file.read(end - start) + cut).splitlines(keepends=True)
            if start and lines:
                cut = lines.pop(0)
            yield from _newest_first(lines, key, is_good)
            end = start


def _newest_first(lines: Sequence[bytes], key: str, is_good: IsGood) -> Iterator[Line]:
    """Yield the good lines that have a key. Looking for its name in the bytes spares parsing most lines."""
    is_beginning = key.endswith("_")
    quoted = f'"{key}'.encode()
    if not is_beginning:
        quoted += b'"'
    for line in reversed(lines):
        if quoted in line and line.endswith(b"\n"):
            value = parse(line)
            if value is None or not is_good(value):
                continue
            if key in value or (is_beginning and any(name.startswith(key) for name in value)):
                yield value


def sample(path: Path, count: int) -> list[Line]:
    """Return lines from about `count` places, evenly spread over a file. Empty if the file is missing.

    Only those lines are read, so a file of any length takes no time. Damaged lines are left out.
    """
    try:
        with open_inside(path) as file:
            lines = _lines_at(file, count)
    except FileNotFoundError:
        return []
    result = []
    for line in lines:
        # The last line may still be being written.
        if line.endswith(b"\n"):
            value = parse(line)
            if value is not None:
                result.append(value)
    return result


def _lines_at(file: BinaryIO, count: int) -> list[bytes]:
    """Return whole lines: of a short file every n-th, of a long one those after `count` places."""
    size = file.seek(0, os.SEEK_END)
    if size <= _TAIL_BYTES:
        file.seek(0)
        all_lines = file.readlines()
        every = -(-len(all_lines) // count)  # rounded up
        return all_lines[:: max(1, every)]

    lines = []
    for index in range(count):
        file.seek(index * size // count)
        if index > 0:
            file.readline()  # the rest of a line whose beginning lies before this place
        lines.append(file.readline())
    return lines


def warn(text: str) -> None:
    """Log a warning about damage once in a process, however often the file is read."""
    if text not in _warned:
        _warned.add(text)
        _log.warning("%s", text)


def describe(numbers: list[int], what: str = "line") -> str:
    """Return ascending numbers as the beginning of a sentence: `line 3 is`, or `lines 3, 7-9 are`."""
    if len(numbers) == 1:
        return f"{what} {numbers[0]:,} is"

    # Join neighbours: [3, 7, 8, 9] → [[3, 3], [7, 9]].
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])

    texts = []
    for first, last in ranges[:_SHOWN_RANGES]:
        text = f"{first:,}"
        if last != first:
            text += f"-{last:,}"
        texts.append(text)
    text = ", ".join(texts)
    if len(ranges) > _SHOWN_RANGES:
        text += f" and {len(ranges) - _SHOWN_RANGES:,} more ranges"
    return f"{what}s {text} are"


def parse(line: bytes) -> Line | None:
    """Return the object that a line holds. None if it holds none."""
    try:
        value = from_json(line)
    except ValueError:
        # Also raised for bytes that are no UTF-8, and for an object that is nested too deeply.
        try:
            # Python's parser takes half a surrogate pair, which the name of a file may have.
            value = json.loads(line)
        except (ValueError, RecursionError):
            return None
    if isinstance(value, dict):
        return value
    return None
