"""Files of JSON lines that a run keeps: whole lines are appended, read as a stream, and damage is stepped over by name.

A file system that was repaired after a power cut leaves torn lines and runs of NULs. They cost the lines they hit and
nothing else: neither the run that goes on nor a page that is made of the rest. Not for what they say (rundir/metrics).
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from itertools import chain, compress, pairwise
from pathlib import Path
from typing import Any, BinaryIO, cast

from pydantic_core import from_json

from kubetune.base import logs
from kubetune.base.files import IrregularFileError, explained_writes, open_inside
from kubetune.errors import EnvironmentFault

Line = dict[str, Any]
IsGood = Callable[[Line], bool]
AreGood = Callable[[list[Any]], bool]
"""Quick test of many objects at once; True only where every one of them `IsGood`."""

_TAIL_BYTES = 64 * 1024
_CHUNK_BYTES = 48 * 1024
"""Some hundred lines, whose objects stay in a cache of the processor."""
_SHOWN_RANGES = 5
_COMPARED_BYTES = 256
"""Of the last line read, by which a follower knows that it is still there."""

_log = logs.family_logger("FILES")
_told: set[str] = set()


class Appender(FileIO):
    """A file that whole lines are appended to, each in one write, which no other process can split."""

    def __init__(self, path: Path) -> None:
        with explained_writes(path):
            super().__init__(path, "ab+")
            size = os.fstat(self.fileno()).st_size
            # A torn line gets an end of its own. Cutting it off could take what another process is just writing.
            self._is_torn = bool(size) and os.pread(self.fileno(), 1, size - 1) != b"\n"

    def append(self, values: Mapping[str, Any]) -> None:
        """Append one line. Raises EnvironmentFault for a full disk, which leaves no part of it, or a file that is gone.

        JSON has no NaN or infinity: they become null. Floats are written by repr, so reading gives back the same bits.
        """
        finite = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in values.items()
        }
        line = logs.scrub(json.dumps(finite, allow_nan=False) + "\n").encode()
        if self._is_torn:
            line = b"\n" + line
        with explained_writes(str(self.name)):
            written = self.write(line)
            if written < len(line):
                # The disk filled up half-way through the line; what was written would spoil the next one.
                self.truncate(os.fstat(self.fileno()).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.name)
        self._is_torn = False

    def require_place(self) -> None:
        """Raise EnvironmentFault when the file was deleted or moved away: what is written on goes nowhere then."""
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
    """The whole lines of a file as objects, one after the other; none when it is missing.

    Lines that hold no object, or none that `is_good`, are stepped over; a warning names them, or `damaged` collects
    their numbers. A last line without an end is not there yet.
    """
    return chain.from_iterable(read_chunks(path, is_good, damaged))


def read_chunks(
    path: Path,
    is_good: IsGood,
    damaged: list[int] | None = None,
    are_good: AreGood = lambda _: False,
) -> Iterator[list[Line]]:
    """As `read`, some hundred lines at once, which is quicker where there are millions."""
    return (values for _, values in _chunks(path, is_good, damaged, are_good))


def read_both(path: Path, is_good: IsGood = lambda _: True) -> Iterator[tuple[bytes, Line]]:
    """As `read`, each object with the bytes of its line."""
    return chain.from_iterable(
        zip(lines, values, strict=True) for lines, values in _chunks(path, is_good, None)
    )


def _chunks(
    path: Path, is_good: IsGood, damaged: list[int] | None, are_good: AreGood = lambda _: False
) -> Iterator[tuple[list[bytes], list[Line]]]:
    wrong: list[int] = []
    try:
        file = open_inside(path)
    except FileNotFoundError:
        return
    before = 0
    with file:
        for lines in _whole_lines(file):
            count = len(lines)
            values = _parse_all(lines)
            if not are_good(values) and not all(
                good := [value is not None and is_good(value) for value in values]
            ):
                wrong += [
                    before + at + 1
                    for at, is_fine in enumerate(good)
                    if not is_fine and lines[at] != b"\n"
                ]
                lines, values = list(compress(lines, good)), list(compress(values, good))
            before += count
            yield lines, cast(list[Line], values)
    if damaged is not None:
        damaged += wrong
    elif wrong:
        warn(f"{path}: {describe(wrong)} damaged and left out: no line that kubetune wrote")


class Follower:
    """Reader of a file of JSON lines that another process adds to, and may cut short or replace, as starts of a run do.

    The file may not be there yet, or no longer. `offset`: the byte to begin at.
    """

    def __init__(self, path: Path, is_good: IsGood = lambda _: True, offset: int = 0) -> None:
        self.path, self._is_good = path, is_good
        self._place, self._inode, self._before = offset, -1, b""
        self.has_begun_anew = False
        """At the last look what had been read was no longer there: its lines are those of the whole file."""
        self.damaged: list[int] = []
        """Numbers of the damaged lines that were stepped over, where the first look began at the first byte."""
        self._count = 0

    @property
    def unread(self) -> int:
        """Bytes that are left to read."""
        try:
            return max(0, self.path.stat().st_size - self._place)
        except OSError:
            return 0

    def read(self) -> Iterator[Line]:
        """The whole, good lines since the last look; half a last line waits, damage is stepped over with a warning."""
        self.has_begun_anew = False
        try:
            file = open_inside(self.path)
        except IrregularFileError as error:
            warn(f"{error}; nothing of it is read")
            return iter(())
        except OSError:
            return iter(())
        facts, kept = os.fstat(file.fileno()), self._before
        is_same = self._inode in (-1, facts.st_ino) and facts.st_size >= self._place
        # Cut short and grown again to at least as much: what stood before the place is another line.
        if not is_same or os.pread(file.fileno(), len(kept), self._place - len(kept)) != kept:
            self.has_begun_anew, self._place, self._before = True, 0, b""
            self.damaged, self._count = [], 0
        self._inode = facts.st_ino
        file.seek(self._place)
        return self._lines(file)

    def _lines(self, file: BinaryIO) -> Iterator[Line]:
        with file:
            for lines in _whole_lines(file):
                for line, value in zip(lines, _parse_all(lines), strict=True):
                    self._place, self._before = self._place + len(line), line[-_COMPARED_BYTES:]
                    self._count += 1
                    if value is not None and self._is_good(value):
                        yield value
                    elif line != b"\n":
                        self.damaged.append(self._count)
                        warn(f"{self.path}: damaged lines are left out: none that kubetune wrote")


def _whole_lines(file: BinaryIO) -> Iterator[list[bytes]]:
    """The lines of a file, some hundred at once; a last one without an end is not there yet."""
    is_last = False
    while not is_last and (lines := file.readlines(_CHUNK_BYTES)):
        if is_last := not lines[-1].endswith(b"\n"):
            lines.pop()
        yield lines


def _parse_all(lines: list[bytes]) -> list[Line | None]:
    """The object of each line, None where it holds none; all by one call, unless one of them is damaged."""
    try:
        found = from_json(b"[" + b",0,".join(lines) + b"]")
    except ValueError:
        return [parse(line) for line in lines]
    # Two damaged lines may make one value, or one of them several: the zeros between lines give it away.
    values, between = found[::2], found[1::2]
    is_whole = (
        len(values) == len(lines)
        and set(map(type, values)) <= {dict}
        and set(map(type, between)) <= {int}
    )
    return values if is_whole else [parse(line) for line in lines]


def last_lines(path: Path, most_bytes: int, folder: Path | None = None) -> list[bytes]:
    """The last lines of a file, so many bytes at most, none of which lacks its beginning; none of a missing file.

    `folder`: that which the file must lie in, its own where left out. Raises as `open_inside` does.
    """
    try:
        with open_inside(path, folder) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most_bytes))
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return lines[1:] if size > most_bytes else lines


def tail(path: Path, is_good: IsGood = lambda _: True, most: int | None = None) -> list[Line]:
    """The last whole, undamaged lines of a file: `most` at most, or as many as a screen may want."""
    found: list[Line] = []
    for line in reversed(last_lines(path, _TAIL_BYTES)):
        if len(found) == most:
            break
        if line.endswith(b"\n"):
            value = parse(line)
            if value is not None and is_good(value):
                found.append(value)
    found.reverse()
    return found


def newest_with(
    path: Path, keys: Sequence[str], is_good: IsGood = lambda _: True
) -> dict[str, Line | None]:
    """Return the last line of `tail` that has each key, None where none has it; only those lines are parsed."""
    lines = last_lines(path, _TAIL_BYTES)
    return {key: _newest_with(lines, key, is_good) for key in keys}


def _newest_with(lines: Sequence[bytes], key: str, is_good: IsGood) -> Line | None:
    quoted = f'"{key}"'.encode()
    for line in reversed(lines):
        if quoted in line and line.endswith(b"\n"):
            value = parse(line)
            if value is not None and key in value and is_good(value):
                return value
    return None


def sample(path: Path, count: int) -> list[Line]:
    """Whole lines from about `count` places of a file, evenly spread; all of a short one, none of one that is missing.

    For a glance at a file of any length: what lies between is not read. Damaged lines are left out.
    """
    try:
        with open_inside(path) as file:
            size = file.seek(0, os.SEEK_END)
            if size <= _TAIL_BYTES:
                file.seek(0)
                lines = file.readlines()
                lines = lines[:: -(-len(lines) // count)] if lines else []
            else:
                lines = []
                for at in range(count):
                    file.seek(at * size // count)
                    if at:
                        file.readline()
                    lines.append(file.readline())
    except FileNotFoundError:
        return []
    return [value for line in lines if line.endswith(b"\n") and (value := parse(line)) is not None]


def warn(text: str) -> None:
    """Tell of damage once in a process, however often the file is read."""
    if text not in _told:
        _told.add(text)
        _log.warning("%s", text)


def describe(numbers: list[int], what: str = "line") -> str:
    """`line 3 is`, or `lines 3, 7-9 are`."""
    if len(numbers) == 1:
        return f"{what} {numbers[0]:,} is"
    starts = [numbers[0], *(after for before, after in pairwise(numbers) if after != before + 1)]
    ends = [*(before for before, after in pairwise(numbers) if after != before + 1), numbers[-1]]
    ranges = [f"{a:,}" if a == b else f"{a:,}-{b:,}" for a, b in zip(starts, ends, strict=True)]
    more = (
        f" and {len(ranges) - _SHOWN_RANGES:,} more ranges" if len(ranges) > _SHOWN_RANGES else ""
    )
    return f"{what}s {', '.join(ranges[:_SHOWN_RANGES])}{more} are"


def parse(line: bytes) -> Line | None:
    """The object that a line holds, None where it holds none."""
    try:
        value = from_json(line)
    except ValueError:  # also for bytes that are no UTF-8, and for what is nested too deeply
        try:
            value = json.loads(line)  # takes half a surrogate pair, as a name of a file may have it
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None
