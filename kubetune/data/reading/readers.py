"""Reading records from files, each with the line it stands on, in flat memory.

One function per format. A line that is no record is noted as a problem and passed over. Adding a format is one
function and one line in READERS.
"""

from __future__ import annotations

import codecs
import csv
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Final, Literal

from kubetune.base.humanize import counted
from kubetune.data.reading.packed import kind_of, opened, unpacking, why_unreadable
from kubetune.data.reading.problems import Problems
from kubetune.data.reading.strict_json import Flawed, Scanner, parse
from kubetune.errors import DataError

MAX_RECORD_BYTES: Final = 32 * 2**20
"""A longer line is taken for a mistake (a file without line breaks) and never held in memory."""

_BLOCK: Final = 2**20


@dataclass(frozen=True, slots=True)
class Record:
    """One record and the place it came from; `line` counts from 1, in Parquet and hub data sets it is the row."""

    file: str
    line: int
    value: dict[str, Any]

    @property
    def where(self) -> str:
        """`file:line`, as errors name it."""
        return f"{self.file}:{self.line}"


def read_file(file: Path, problems: Problems) -> Iterator[Record]:
    """The records of a file of any format that READERS knows; of another one as JSON lines."""
    with unpacking(file):
        with opened(file) as stream:
            problem = why_unreadable(stream.read(1024), file)
        if problem is not None:
            problems.add(f"{file}:1", problem)
            return
        yield from READERS.get(kind_of(file), read_jsonl)(file, problems)


def read_jsonl(file: Path, problems: Problems) -> Iterator[Record]:
    """One JSON object per line. Blank lines are passed over, as `datasets` and pandas do."""
    unsure = True
    blank = 0
    with opened(file) as stream:
        for number, line in enumerate(_lines(stream), 1):
            if line.isspace():
                blank += 1
                continue
            problems.blank_lines += blank  # those at the end of the file are not counted
            blank = 0
            try:
                value = _parse_line(line)
            except ValueError as error:
                if unsure:
                    unsure = False
                    if (whole := _value_over_lines(file)) and kind_of(file) != ".json":
                        said = f"begins {whole}; expected one JSON object per line"
                        problems.add(
                            f"{file}:{number}",
                            f"{said}. Name the file {file.stem}.json to have it read so",
                        )
                        return
                problems.add(f"{file}:{number}", str(error))
            else:
                unsure = False
                yield Record(str(file), number, value)


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Lines with their line breaks; of one that is too long only the beginning."""
    while line := stream.readline(MAX_RECORD_BYTES + 1):
        if len(line) > MAX_RECORD_BYTES:
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = stream.readline(_BLOCK)
        yield line


def _parse_line(line: bytes) -> dict[str, Any]:
    if len(line) > MAX_RECORD_BYTES:
        raise ValueError(
            f"is longer than {MAX_RECORD_BYTES:,} bytes; expected one JSON object per line"
        )
    if line.startswith(codecs.BOM_UTF8):
        raise ValueError("begins with a byte order mark; save the file as UTF-8 without one")
    if b"\0" in line:
        raise ValueError(f"holds a NUL byte at column {line.index(0) + 1}; expected UTF-8 text")
    try:
        value = parse(line.rstrip(b"\r\n"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"is not UTF-8: byte 0x{line[error.start]:02x} at column {error.start + 1}"
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {_json_mistake(error)} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    return _require_object(value)


def _json_mistake(error: json.JSONDecodeError) -> str:
    """The fault that `json` found, in words that can stand before `at column 7`."""
    is_control = error.msg.startswith("Invalid control character")
    if error.msg.startswith("Unterminated string") or (
        is_control and error.doc[error.pos] in "\r\n"
    ):
        return "an open string"
    if is_control:
        return "a control character in a string"
    return error.msg


def _require_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"is {_json_kind(value)}; expected a JSON object")
    return value


def _json_kind(value: Any) -> str:
    kinds = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")


def read_json(file: Path, problems: Problems) -> Iterator[Record]:
    """A JSON list of objects, parsed piece by piece; or objects one after the other, each on lines of its own.

    A file that begins with an object on one line is read as JSON lines, which names every bad one.
    """
    with opened(file) as stream:
        start = stream.read(4096).lstrip(codecs.BOM_UTF8 + b" \t\r\n")[:1]
    if start == b"{" and not _has_object_over_lines(file):
        yield from read_jsonl(file, problems)
        return
    with opened(file) as stream:
        scanner = _Scan(stream)
        try:
            for line, value in scanner.objects() if start == b"{" else scanner.items():
                if isinstance(value, Flawed):
                    problems.add(f"{file}:{line}", str(value))
                elif isinstance(value, dict):
                    yield Record(str(file), line, value)
                else:
                    problems.add(
                        f"{file}:{line}", f"is {_json_kind(value)}; expected a JSON object"
                    )
        except UnicodeDecodeError as error:
            problems.add(
                f"{file}:{scanner.line}",
                f"is not UTF-8: byte 0x{error.object[error.start]:02x} after here",
            )
        except ValueError as error:
            problems.add(f"{file}:{scanner.line}", str(error))


def _value_over_lines(file: Path) -> str:
    """Form of a file that is no JSON lines: an object printed over several of them, or one list; empty if neither."""
    with opened(file) as stream:
        if stream.read(4096).lstrip(codecs.BOM_UTF8 + b" \t\r\n")[:1] != b"[":
            return "a JSON object over several lines" if _has_object_over_lines(file) else ""
        stream.seek(0)
        scan, others = _Scan(stream), 0
        try:
            for _, value in islice(scan.items(), 2):
                others += not isinstance(value, dict | Flawed)
        except (ValueError, RecursionError):
            return ""
    if others:
        return ""
    with opened(file) as stream:
        lines = (line for line in _lines(stream) if line.strip(codecs.BOM_UTF8 + b" \t\r\n"))
        first, second = next(lines, b""), next(lines, b"")
    # A list on each line is a mistake of its own, of every line.
    return "" if second and first.rstrip().endswith(b"]") else "a JSON list"


def _has_object_over_lines(file: Path) -> bool:
    """The object that a file begins with ends on a later line, as pretty-printed ones do."""
    with opened(file) as stream:
        scan = _Scan(stream)
        try:
            line, _ = next(scan.objects())
        except (ValueError, RecursionError):
            return False
        return scan.line > line


class _Scan:
    """Finds (line, value) of what stands in a JSON text, holding one block and one value at a time.

    A value that must not be read as it stands is a Flawed.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self.line = 1
        self._stream = stream
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self._at = 0
        self._ended = False
        self._values = Scanner()

    def objects(self) -> Iterator[tuple[int, Any]]:
        """Values that stand one after the other, with white space between them at most."""
        while self._next_char():
            line, value = self.line, self._next_value()
            yield line, value

    def items(self) -> Iterator[tuple[int, Any]]:
        """The values in a list, which is all that there may be."""
        if self._next_char() != "[":
            raise ValueError("does not begin with `[`; expected a JSON list of objects")
        self._at += 1
        if self._next_char() == "]":
            self._at += 1
            self._require_end()
            return
        while True:
            self._next_char()
            line, value = self.line, self._next_value()
            yield line, value
            char = self._next_char()
            self._at += 1
            if char == "]":
                self._require_end()
                return
            if char != ",":
                raise ValueError(
                    f"is not JSON: found {char!r} after an object; expected `,` or `]`"
                )

    def _require_end(self) -> None:
        if char := self._next_char():
            raise ValueError(
                f"has {char!r} after the end of the list; expected one JSON list, and nothing else"
            )

    def _next_char(self) -> str:
        """The next character that is no white space, left unread; empty at the end of the file."""
        while True:
            begin = self._at
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            self.line += self._text.count("\n", begin, self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_more():
                return ""

    def _next_value(self) -> Any:
        while True:
            begin = self._at
            try:
                value, end = self._values.value_at(self._text, begin)
            except json.JSONDecodeError as error:
                if self._read_more():
                    continue
                self.line += error.doc.count(
                    "\n", begin, error.pos
                )  # reading on has moved what was read before
                raise ValueError(f"is not JSON: {_json_mistake(error)}") from None
            except RecursionError:
                raise ValueError("is nested too deeply") from None
            if end < len(self._text) or not self._read_more():
                self.line += self._text.count("\n", self._at, end)
                self._at = end
                return value

    def _read_more(self) -> bool:
        """Read at least as much again as is waiting, so that a long value is not parsed too often."""
        if self._ended or len(self._text) - self._at > MAX_RECORD_BYTES:
            return False
        block = self._stream.read(max(_BLOCK, len(self._text) - self._at))
        self._ended = not block
        self._text = self._text[self._at :] + self._utf8.decode(block, self._ended)
        self._at = 0
        return bool(block)


def read_csv(file: Path, problems: Problems) -> Iterator[Record]:
    """Comma-separated values with a header; quoted values may hold line breaks."""
    yield from _read_table(file, problems, ",")


def read_tsv(file: Path, problems: Problems) -> Iterator[Record]:
    """Tab-separated values with a header; quoted values may hold tabs and line breaks.

    Where a file makes sense only if quotes are characters like others, as GLUE's do, they are. One that makes sense in
    both ways, but has other records then, is refused.
    """
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL
    if _begins_with_quotes(file):
        quoted, plain = (
            _rows_of_table(file, csv.QUOTE_MINIMAL),
            _rows_of_table(file, csv.QUOTE_NONE),
        )
        if quoted and plain and quoted != plain:
            ways = f"{counted(quoted - 1, 'record')} if quotes enclose values, {plain - 1:,} if they are text"
            problems.add(f"{file}:1", f"can be read in two ways, as {ways}; write it as JSON lines")
            return
        quoting = csv.QUOTE_NONE if plain and not quoted else csv.QUOTE_MINIMAL
    yield from _read_table(file, problems, "\t", quoting)


def _begins_with_quotes(file: Path) -> bool:
    with opened(file) as stream:
        return any(line.startswith(b'"') or b'\t"' in line for line in _lines(stream))


def _rows_of_table(file: Path, quoting: Literal[0, 3]) -> int:
    """The number of rows, read in this way; 0 where they have not all as many values."""
    csv.field_size_limit(MAX_RECORD_BYTES)
    with opened(file) as stream:
        rows = csv.reader(
            map(_decode_line, _lines(stream)), delimiter="\t", quoting=quoting, strict=True
        )
        try:
            lengths = Counter(map(len, filter(None, rows)))
        except (csv.Error, ValueError):
            return 0
    return lengths.total() if len(lengths) == 1 else 0


def _read_table(
    file: Path, problems: Problems, delimiter: str, quoting: Literal[0, 3] = csv.QUOTE_MINIMAL
) -> Iterator[Record]:
    csv.field_size_limit(MAX_RECORD_BYTES)
    with opened(file) as stream:
        rows = csv.reader(
            map(_decode_line, _lines(stream)), delimiter=delimiter, quoting=quoting, strict=True
        )
        line = 1
        try:
            header = next(rows, [])
            if not any(header):
                problems.add(
                    f"{file}:1", "is blank; expected a header with the names of the columns"
                )
                return
            header[0] = header[0].removeprefix(
                "\ufeff"
            )  # Excel begins its UTF-8 tables with a byte order mark
            if twice := [name for name, count in Counter(header).items() if count > 1]:
                names = ", ".join(f"`{name}`" for name in twice)
                problems.add(
                    f"{file}:1",
                    f"has the column {names} more than once; all but the last would be lost",
                )
                return
            line = rows.line_num + 1
            blank = 0
            for row in rows:
                if not row:
                    blank += 1
                    line = rows.line_num + 1
                    continue
                problems.blank_lines += blank  # those at the end of the file are not counted
                blank = 0
                if len(row) == len(header):
                    yield Record(str(file), line, dict(zip(header, row, strict=True)))
                else:
                    problems.add(
                        f"{file}:{line}",
                        f"has {counted(len(row), 'value')}; expected {len(header)}, as in the header",
                    )
                line = rows.line_num + 1
        except csv.Error as error:
            problems.add(f"{file}:{line}", f"cannot be read as a table: {error}")
        except ValueError as error:
            problems.add(f"{file}:{rows.line_num + 1}", str(error))


def _decode_line(line: bytes) -> str:
    if len(line) > MAX_RECORD_BYTES:
        raise ValueError(f"is longer than {MAX_RECORD_BYTES:,} bytes")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"is not UTF-8: byte 0x{line[error.start]:02x} at column {error.start + 1}"
        ) from None


def read_parquet(file: Path, problems: Problems) -> Iterator[Record]:
    """Rows of a Parquet file."""
    number, table = 0, _parquet(file)
    if twice := _named_twice(table.schema_arrow):
        problems.add(
            f"{file}:1", f"has the column `{twice}` more than once; all but one would be lost"
        )
        return
    for batch in table.iter_batches(batch_size=1000):
        for value in batch.to_pylist():
            number += 1
            yield Record(str(file), number, without_nulls(value))


def without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a table without the nulls in its objects.

    Columns of Arrow give all objects the same keys, so that a call of `f(a)` beside one of `g(b)` has `b: null`.
    """
    return {
        key: _said(value) if isinstance(value, (dict, list)) else value
        for key, value in row.items()
    }


def _said(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _said(item) for key, item in value.items() if item is not None}
    return [_said(item) for item in value] if isinstance(value, list) else value


def _named_twice(fields: Iterable[Any], place: str = "") -> str:
    """The first name that two fields of Arrow beside each other have; empty where none has."""
    seen: set[str] = set()
    for field in fields:
        name, kind = f"{place}{field.name}", field.type
        if name in seen:
            return name
        seen.add(name)
        while hasattr(kind, "value_type"):
            kind = kind.value_type
        if inner := _named_twice(kind, f"{name}.") if hasattr(kind, "get_field_index") else "":
            return inner
    return ""


def read_txt(file: Path, problems: Problems) -> Iterator[Record]:
    """Plain text, of which every stretch without a blank line is a record with the key `text`.

    So a file without blank lines is one record, and line breaks within a paragraph stay.
    """
    begin, lines, size = 1, list[str](), 0
    with opened(file) as stream:
        for number, line in enumerate(chain(_lines(stream), [b""]), 1):
            if line.strip():
                begin = begin if lines or size else number
                size += len(line)
                if size > MAX_RECORD_BYTES:
                    lines = []
                    continue
                try:
                    lines.append(_decode_text(line, number))
                except ValueError as error:
                    problems.add(f"{file}:{number}", str(error))
                continue
            if size > MAX_RECORD_BYTES:
                problems.add(
                    f"{file}:{begin}",
                    f"is longer than {MAX_RECORD_BYTES:,} bytes up to the next blank line",
                )
            elif lines:
                yield Record(str(file), begin, {"text": "\n".join(lines)})
            lines, size = [], 0


def _decode_text(line: bytes, number: int) -> str:
    text = _decode_line(line).rstrip("\r\n")
    if "\0" in text:
        raise ValueError(
            f"holds a NUL byte at column {text.index(chr(0)) + 1}; expected UTF-8 text"
        )
    return text.removeprefix("\ufeff") if number == 1 else text


def parquet_rows(file: Path) -> int:
    """The number of rows that a Parquet file says it has."""
    return int(_parquet(file).metadata.num_rows)


def parquet_features(file: Path) -> dict[str, Any]:
    """The account that `datasets` gives of the columns of a Parquet file that it wrote; nothing of another's."""
    said = (_parquet(file).schema_arrow.metadata or {}).get(b"huggingface", b"{}")
    try:
        features = json.loads(said)["info"]["features"]
    except (ValueError, LookupError, TypeError):
        return {}
    return features if isinstance(features, dict) else {}


def _parquet(file: Path) -> Any:
    from kubetune.extras import require

    require(f"{file}, a Parquet file,", "pyarrow")
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{file} is not a Parquet file: {error}. Nothing was written.") from error


def count_lines(file: Path) -> int:
    """Return the number of lines that are not blank; a last one without a line break counts."""
    lines = 0
    with unpacking(file), opened(file) as stream:
        for line in _lines(stream):
            lines += not line.isspace()
    return lines


READERS: Final[dict[str, Callable[[Path, Problems], Iterator[Record]]]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".parquet": read_parquet,
    ".txt": read_txt,
}
