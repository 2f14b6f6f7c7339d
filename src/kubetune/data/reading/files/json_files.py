"""Reading JSON files: an object on each line, one list of objects, or objects one after the other.

A record that cannot be read is noted as a problem with its line, and reading goes on after it.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

from kubetune.config.data_files import ending_of
from kubetune.data.reading import record
from kubetune.data.reading.files.packed import opened, unpacking
from kubetune.data.reading.files.reader import Reader
from kubetune.data.reading.record import Record, lines, not_utf8, require_length
from kubetune.data.reading.record_problems import Problems
from kubetune.data.reading.strict_json import Flawed, JsonObject, parse, value_at

_BLANKS: Final = codecs.BOM_UTF8 + b" \t\r\n"


def read_jsonl(file: Path, problems: Problems) -> Iterator[Record]:
    """Read one JSON object per line. Blank lines are passed over, as `datasets` and pandas do.

    A file that is laid out otherwise, such as one list, gets one problem that says so, not one for each of its lines.
    """
    is_first = True
    blank = 0
    with opened(file) as stream:
        for number, line in enumerate(lines(stream), 1):
            if line.isspace():
                blank += 1
                continue
            # Only now: blank lines at the end of the file are not counted.
            problems.blank_lines += blank
            blank = 0
            try:
                value = _parse_line(line)
            except ValueError as error:
                layout = ""
                if is_first:
                    layout = _other_layout(file)
                if layout:
                    advice = f"Name the file {file.stem}.json to have it read so"
                    mistake = f"begins {layout}; expected one JSON object per line. {advice}"
                    problems.add(f"{file}:{number}", mistake)
                    return
                problems.add(f"{file}:{number}", str(error))
            else:
                yield Record(str(file), number, value)

            is_first = False


def _parse_line(line: bytes) -> JsonObject:
    require_length(line, "; expected one JSON object per line")
    # Known mistakes are named before a parser says something less clear.
    if line.startswith(codecs.BOM_UTF8):
        raise ValueError("begins with a byte order mark; save the file as UTF-8 without one")
    if b"\0" in line:
        raise ValueError(f"holds a NUL byte at column {line.index(0) + 1}; expected UTF-8 text")
    try:
        value = parse(line.rstrip(b"\r\n"))
    except UnicodeDecodeError as error:
        raise not_utf8(line, error) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {_json_mistake(error)} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None

    return _require_object(value)


def _json_mistake(error: json.JSONDecodeError) -> str:
    """Return what `json` found, in words that can be before `at column 7`."""
    if error.msg.startswith("Unterminated string"):
        return "an open string"
    if not error.msg.startswith("Invalid control character"):
        return error.msg
    if error.doc[error.pos] in "\r\n":
        return "an open string"
    return "a control character in a string"


def _require_object(value: Any) -> JsonObject:
    if isinstance(value, dict):
        return value
    # True and False are whole numbers to Python, but `type` tells them apart.
    kinds = {
        list: "a list",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    raise ValueError(f"is {kinds.get(type(value), 'null')}; expected a JSON object")


def read_json(file: Path, problems: Problems) -> Iterator[Record]:
    """Read a JSON list of objects piece by piece, or objects one after the other, each on lines of its own.

    A file that begins with an object on one line is read as JSON lines, which names every bad one.
    """
    if _first_char(file) == b"{" and not _has_object_over_lines(file):
        yield from read_jsonl(file, problems)
        return
    with opened(file) as stream:
        scan = _JsonScan(stream)
        try:
            for line, value in scan.values():
                try:
                    if isinstance(value, Flawed):
                        raise value
                    yield Record(str(file), line, _require_object(value))
                except ValueError as error:
                    problems.add(f"{file}:{line}", str(error))
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            problems.add(f"{file}:{scan.line}", f"is not UTF-8: byte 0x{byte:02x} after here")
        except ValueError as error:
            problems.add(f"{file}:{scan.line}", str(error))


def _other_layout(file: Path) -> str:
    """Return what a file of JSON lines begins with where it is laid out as a `.json` file; empty if it is not."""
    if ending_of(file) == ".json":
        return ""
    if _first_char(file) == b"[":
        return "a JSON list" if _is_one_list(file) else ""
    return "a JSON object over several lines" if _has_object_over_lines(file) else ""


def _first_char(file: Path) -> bytes:
    with opened(file) as stream:
        return stream.read(4096).lstrip(_BLANKS)[:1]


def _is_one_list(file: Path) -> bool:
    """True if a file that begins with `[` holds one list of objects, and not a list on each line."""
    with opened(file) as stream:
        try:
            _, value = next(_JsonScan(stream).values(), (1, {}))
        except (ValueError, RecursionError):
            return False

    if not isinstance(value, dict | Flawed):
        return False
    # `[{"text": "a"}]` on every line is a list on each line: the first line ends with `]`, and others follow.
    with opened(file) as stream:
        written = (line for line in lines(stream) if line.strip(_BLANKS))
        first = next(written, b"")
        second = next(written, b"")

    return not (second and first.rstrip().endswith(b"]"))


def _has_object_over_lines(file: Path) -> bool:
    """True if the object that a file begins with ends on a later line, as pretty-printed ones do."""
    with opened(file) as stream:
        scan = _JsonScan(stream)
        try:
            line, _ = next(scan.values(), (1, None))
        except (ValueError, RecursionError):
            return False
        return scan.line > line


class _JsonScan:
    """Reads a JSON text value by value, and holds one block and one value of it at a time."""

    def __init__(self, stream: IO[bytes]) -> None:
        # the line that is read, or that a mistake is on
        self.line = 1
        self._stream = stream
        # a block may end within a character
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")()
        # what was read of the file and is still needed
        self._text = ""
        # the index in this text that reading has come to
        self._at = 0
        self._is_at_end = False

    def values(self) -> Iterator[tuple[int, Any]]:
        """Yield each value of a list, or of objects one after the other, with the line that it begins on.

        A value that must not be read as it is becomes a Flawed. Raise ValueError where reading cannot go on.
        """
        if self._next_char() == "{":
            yield from self._objects()
        else:
            yield from self._items()

    def _objects(self) -> Iterator[tuple[int, Any]]:
        while self._next_char():
            line = self.line
            yield line, self._next_value()

    def _items(self) -> Iterator[tuple[int, Any]]:
        if self._next_char() != "[":
            raise ValueError("does not begin with `[`; expected a JSON list of objects")
        self._at += 1
        # An empty list has `]` where others have their first value.
        separator = ","
        if self._next_char() == "]":
            separator = "]"
            self._at += 1
        while separator == ",":
            self._next_char()
            line = self.line
            yield line, self._next_value()
            separator = self._next_char()
            self._at += 1

        if separator != "]":
            raise ValueError(
                f"is not JSON: found {separator!r} after an object; expected `,` or `]`"
            )
        if char := self._next_char():
            raise ValueError(
                f"has {char!r} after the end of the list; expected one JSON list, and nothing else"
            )

    def _next_char(self) -> str:
        """Return the next character that is no white space, left unread; empty at the end of the file."""
        while True:
            begin = self._at
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            # Mistakes are named by the line that they are on.
            self.line += self._text.count("\n", begin, self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_more():
                return ""

    def _next_value(self) -> Any:
        while True:
            try:
                value, end = value_at(self._text, self._at)
            except json.JSONDecodeError as error:
                begin = self._at
                if self._read_more():
                    continue
                # Trying to read on has moved the text, so the lines are counted where the error saw it.
                self.line += error.doc.count("\n", begin, error.pos)
                raise ValueError(f"is not JSON: {_json_mistake(error)}") from None
            except RecursionError:
                raise ValueError("is nested too deeply") from None

            # A number at the end of what was read may go on after it.
            if end < len(self._text) or not self._read_more():
                self.line += self._text.count("\n", self._at, end)
                self._at = end
                return value

    def _read_more(self) -> bool:
        """Read at least as much again as is waiting, so that a long value is not parsed too often."""
        waiting = len(self._text) - self._at
        if waiting > record.MAX_RECORD_BYTES:
            raise ValueError(f"is longer than {record.MAX_RECORD_BYTES:,} bytes")
        if self._is_at_end:
            return False
        # Twice as much each time: a value of n bytes is then parsed log n times, and not n times.
        block = self._stream.read(max(record.BLOCK, waiting))
        self._is_at_end = not block
        self._text = self._text[self._at :] + self._utf8.decode(block, self._is_at_end)
        self._at = 0
        return bool(block)


def count_lines(file: Path) -> int:
    """Return the number of lines that are not blank; a last one without a line break counts."""
    with unpacking(file), opened(file) as stream:
        return sum(not line.isspace() for line in lines(stream))


LINES: Final = Reader(read_jsonl, count=count_lines)
LIST: Final = Reader(read_json)
