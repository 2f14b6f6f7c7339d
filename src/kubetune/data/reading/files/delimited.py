"""Reading tables of values with separators, under a header."""

from __future__ import annotations

import codecs
import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Any, Final, Literal

from kubetune.base.humanize import counted, place, shell_word
from kubetune.data.reading import record
from kubetune.data.reading.files.headers import (
    SAMPLE,
    SAMPLE_CHARACTERS,
    judge,
    naming_command,
)
from kubetune.data.reading.files.packed import is_packed, opened
from kubetune.data.reading.files.reader import Reader
from kubetune.data.reading.record import Record, decode, lines
from kubetune.data.reading.record_problems import Problems

# Characters of a name of a column, where commas may separate several.
_LONGEST_NAME: Final = 40
Quoting = Literal[0, 3]  # csv.QUOTE_MINIMAL: quotes enclose values; csv.QUOTE_NONE: they are text


def read_csv(file: Path, problems: Problems) -> Iterator[Record]:
    """Read comma-separated values with a header; quoted values may hold line breaks."""
    yield from _read_table(file, problems, ",", csv.QUOTE_MINIMAL)


def read_tsv(file: Path, problems: Problems) -> Iterator[Record]:
    """Read tab-separated values with a header; quoted values may hold tabs and line breaks.

    Some tools write quotes as text, as GLUE's files have them: `He said "no"<tab>1`, or a single `"` at the beginning
    of a value. So both ways are tried. A file that makes sense in one of them is read so. One that makes sense in both,
    but with other records, is refused.
    """
    quoting: Quoting = csv.QUOTE_MINIMAL
    if _begins_with_quotes(file):
        # A table makes sense where all its rows have as many values.
        enclosing = _count_rows(file, csv.QUOTE_MINIMAL)
        as_text = _count_rows(file, csv.QUOTE_NONE)
        if enclosing and as_text and enclosing != as_text:
            records = counted(enclosing - 1, "record")
            ways = f"{records} if quotes enclose values, {as_text - 1:,} if they are text"
            problems.add(f"{file}:1", f"can be read in two ways, as {ways}; write it as JSON lines")
            return
        if as_text and not enclosing:
            quoting = csv.QUOTE_NONE

    yield from _read_table(file, problems, "\t", quoting)


def _begins_with_quotes(file: Path) -> bool:
    """True if a value of the table begins with a quote."""
    with opened(file) as stream:
        return any(line.startswith(b'"') or b'\t"' in line for line in _lines(stream))


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a table, without the byte order mark with which Excel begins its UTF-8 tables.

    It goes before the line is split: after it, a quote would be no longer the first character of its value.
    """
    is_first = True
    for line in lines(stream):
        yield line.removeprefix(codecs.BOM_UTF8) if is_first else line
        is_first = False


def _rows(
    stream: IO[bytes],
    delimiter: str,
    quoting: Quoting,
) -> Any:
    """Return a `csv.reader` of the stream, which also knows the number of the line it has come to."""
    csv.field_size_limit(record.MAX_RECORD_BYTES)
    return csv.reader(
        map(decode, _lines(stream)),
        delimiter=delimiter,
        quoting=quoting,
        strict=True,
    )


def _count_rows(file: Path, quoting: Quoting) -> int:
    """Return the number of rows, read in this way; 0 where they have not all as many values."""
    with opened(file) as stream:
        rows = _rows(stream, "\t", quoting)
        try:
            # Blank lines are no rows.
            lengths = Counter(len(row) for row in rows if row)
        except (csv.Error, ValueError):
            return 0
    return lengths.total() if len(lengths) == 1 else 0


def _read_table(
    file: Path,
    problems: Problems,
    delimiter: str,
    quoting: Quoting,
) -> Iterator[Record]:
    with opened(file) as stream:
        rows = _numbered_rows(_rows(stream, delimiter, quoting), file, problems)
        before = problems.total
        _, header = next(rows, (1, []))
        if problems.total > before:
            return
        first = _first_rows(rows)

        # Without a good header no row can be named.
        below = [row for _, row in first]
        mistake = _header_mistake(file, header, below, delimiter)
        mistake = mistake or _record_in_place(file, problems, header, below, delimiter)
        if mistake:
            problems.add(f"{file}:1", mistake)
            return
        blank = 0  # blank lines since the last row
        for line, row in chain(first, rows):
            if not row:
                blank += 1
                continue
            # Only now: blank lines at the end of the file are not counted.
            problems.blank_lines += blank
            blank = 0
            mistake = _row_mistake(row, header)
            if mistake:
                problems.add(f"{file}:{line}", mistake)
            else:
                yield Record(str(file), line, dict(zip(header, row, strict=True)))


def _numbered_rows(rows: Any, file: Path, problems: Problems) -> Iterator[tuple[int, list[str]]]:
    """Yield each row with the line that it begins on: quoted values may go on over several."""
    line = 1
    try:
        for row in rows:
            yield line, row
            line = rows.line_num + 1
    # Behind a misplaced quote nothing tells where the next row begins, so reading ends here.
    except csv.Error as error:
        problems.add(f"{file}:{line}", f"cannot be read as a table: {error}")
    except ValueError as error:
        problems.add(f"{file}:{rows.line_num + 1}", str(error))


def _first_rows(rows: Iterator[tuple[int, list[str]]]) -> list[tuple[int, list[str]]]:
    """Take so many rows as tell what the header is."""
    first: list[tuple[int, list[str]]] = []
    characters = 0
    while len(first) < SAMPLE and characters < SAMPLE_CHARACTERS:
        numbered = next(rows, None)
        if numbered is None:
            break
        first.append(numbered)
        characters += sum(map(len, numbered[1]))
    return first


def _record_in_place(
    file: Path,
    problems: Problems,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    delimiter: str,
) -> str:
    """Return what is wrong with a record in the place of the header; empty for names. A doubt is only noted."""
    verdict, reason = judge(header, rows)
    if verdict == "header":
        return ""
    whole = [header, *(row for row in rows if len(row) == len(header))]
    command = naming_command(file, whole, delimiter)
    if verdict == "doubtful":
        problems.doubts.append(
            f"{place(file)}:1: {_quoted(header)} are taken for the names of columns, and look like the records below. If "
            f"they are a record, it is lost; write the names above it: `{command}`"
        )
        return ""
    return (
        f"is a record in the place of the header, since {reason}; as a header it would be lost. Write the names of the "
        f"columns above it: `{command}`. If they are names, write shorter ones"
    )


def _quoted(header: Sequence[str]) -> str:
    return ", ".join(f"`{name[:40]}`" for name in header[:4])


def _row_mistake(row: Sequence[str], header: Sequence[str]) -> str:
    """Return what is wrong with a row; empty if nothing is."""
    if len(row) != len(header):
        values = counted(len(row), "value")
        return f"has {values}; expected {len(header)}, as in the header"
    # Files that were joined have each its own header.
    if row == header and len(row) > 1:
        return "is the header again, as where files were joined; remove the line"
    return ""


def _header_mistake(
    file: Path,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    delimiter: str,
) -> str:
    """Return what is wrong with the names of the columns; empty if nothing is. `rows`: the first ones."""
    if not any(header):
        return "is blank; expected a header with the names of the columns"
    line = delimiter.join(header)
    if re.fullmatch(r"sep=.{0,2}", line.strip(), re.IGNORECASE):
        made = file.with_name(f"table-{file.name.removesuffix('.gz')}")
        read = f"gunzip -c {shell_word(file)} |" if is_packed(file) else f"< {shell_word(file)}"
        return (
            f"is `{line}`, which tells Excel what stands between columns; expected a header. To remove it: "
            f"`{read} tail -n +2 > {shell_word(made)}`"
        )
    separator = _other_separator(header, rows, delimiter)
    if separator:
        return _separated_by(separator, file, delimiter)
    counts = Counter(header)
    twice = ", ".join(f"`{name}`" for name, count in counts.items() if count > 1)
    if twice:
        return f"has the column {twice} more than once; all but the last would be lost"
    return ""


def _other_separator(header: Sequence[str], rows: Sequence[Sequence[str]], delimiter: str) -> str:
    """Return what stands between the columns of a table that has only one; empty where it is one."""
    if len(header) != 1:
        return ""
    name = header[0]
    for sign in "\t;|,":
        parts = name.split(sign)
        # Commas are in texts, too: each line has as many as its header at least, and names are short.
        are_names = all(part.strip() and len(part) <= _LONGEST_NAME for part in parts)
        are_alike = all(delimiter.join(row).count(sign) >= len(parts) - 1 for row in rows)
        if sign != delimiter and len(parts) > 1 and (sign in "\t;" or (are_names and are_alike)):
            return sign
    return ""


def _separated_by(separator: str, file: Path, delimiter: str) -> str:
    """Return what is wrong with a table of other separators than those of its ending."""
    called = {"\t": "tabs", ",": "commas"}
    sign = called.get(separator, f"`{separator}`")
    text = f"has one column, and {sign} in its name; expected {called[delimiter]} between columns"
    if separator in called:
        ending = {"\t": ".tsv", ",": ".csv"}[separator]
        return f"{text}. Name the file {re.sub('[.](csv|tsv)', ending, file.name)}"
    # Spreadsheets write `;` in countries where the comma is in numbers.
    writer = "sys.stdout" if delimiter == "," else "sys.stdout, delimiter='\\t'"
    return (
        f'{text}. To convert: python3 -c "import csv, sys; csv.writer({writer}).writerows(csv.reader(sys.stdin, '
        f"delimiter='{separator}'))\" < FILE > NEW"
    )


COMMAS: Final = Reader(read_csv)
TABS: Final = Reader(read_tsv)
