"""Tables and labelled facts on the terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from kubetune.base.humanize import visible
from kubetune.base.logs import scrub
from kubetune.base.terminal import BOLD, RED, YELLOW, coloured, fold

# Characters of a cell that continues below itself, at least.
NARROWEST = 8
NARROWEST_SENTENCE = 24
GAP = "  "

_SEVERITIES = {"error": RED, "warning": YELLOW}


def print_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print columns as wide as they need to be; on a narrower terminal, cells continue below themselves.

    Nothing is cut off, so that everything can be searched and copied.
    """
    # A file or a pipe has no width: programs that read it expect one line for each row.
    width = None
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    text = "\n".join(table(head, rows, width))
    print(visible(scrub(text)))


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[object]],
    width: int | None = None,
    sentences: str = "",
    paths: str = "",
) -> Iterator[str]:
    """Yield the lines of a table, in `width` columns of a terminal where its words allow that.

    `sentences`: name of the column of sentences, which continue below themselves before any other cell does.
    `paths`: name of the column that does so next, until it is narrow.

    A row shorter than the head ends with a sentence, which may be as long as it likes.
    """
    lines = [list(head)]
    for row in rows:
        cells = []
        for cell in row:
            cells.append("" if cell is None else str(cell))
        lines.append(cells)

    widths = _widths(lines, width, sentences, paths)
    for line in lines:
        # Each cell is a list of lines, which lie below each other:
        #     ["support-", "bot"], ["done"]   →   support-  done
        #                                         bot
        folded = []
        for column, cell in enumerate(line):
            folded.append(fold(cell, widths[column]))
        if len(line) < len(head):
            # The sentence at the end of a short row stays in one line.
            folded[-1] = line[-1:]

        for parts in zip_longest(*folded, fillvalue=""):
            printed = ""
            for column, part in enumerate(parts):
                printed += part.ljust(widths[column]) + GAP
            yield printed.rstrip()


class _Column:
    """A column of a table, while its width is chosen."""

    def __init__(self, name: str, *, sentences: str, paths: str) -> None:
        # Columns of a smaller number are narrowed before those of a larger.
        self.turn = 2
        self.least = max(len(name), NARROWEST)  # characters: the head stays whole
        if name == sentences:
            self.turn = 0
            self.least = NARROWEST_SENTENCE
        elif name == paths:
            self.turn = 1
            self.least = NARROWEST_SENTENCE
        self.lengths: list[int] = []  # of its cells
        self.width = 0

    def cost(self) -> tuple[int, int, int]:
        """Return how many cells would not fit if it were narrower by one. Of equals, the widest column is first."""
        folded = sum(length >= self.width for length in self.lengths)
        return self.turn, folded, -self.width


def _widths(
    lines: Sequence[Sequence[str]], width: int | None, sentences: str, paths: str
) -> list[int]:
    """Return the width of each column. The first line is the head.

    Where they are wider than `width` together, the column is narrowed, character by character, in which the
    fewest cells continue below themselves.
    """
    columns = []
    for name in lines[0]:
        columns.append(_Column(name, sentences=sentences, paths=paths))
    for line in lines:
        # The last cell of a short row is a sentence, which gives its column no width.
        cells = line
        if len(line) < len(columns):
            cells = line[:-1]
        for column, cell in zip(columns, cells, strict=False):
            column.lengths.append(len(cell))
            column.width = max(column.width, len(cell))

    # Example: columns of 20, 12 and 8 in a terminal of 40, with gaps of 2. They are too wide by 4.
    total = len(GAP) * (len(columns) - 1)
    for column in columns:
        total += column.width
    while width is not None and total > width:
        narrowable = [column for column in columns if column.width > column.least]
        if not narrowable:
            break
        min(narrowable, key=_Column.cost).width -= 1
        total -= 1
    return [column.width for column in columns]


def print_fact(label: str, text: str, width: int, colour: int = BOLD) -> None:
    """Print a fact after its label of `width` columns; on a terminal it continues below itself.

    `colour`: of the label. Text that begins with `warning:` or `error:` has the colour of that.
    """
    lines = [text]
    if sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns - width - 1
        lines = fold(text, max(columns, NARROWEST), breaks=False)
    of_text = _SEVERITIES.get(text.partition(":")[0])
    for name, line in zip_longest([label], lines, fillvalue=""):
        first = visible(scrub(f"{name:<{width}}"))
        second = visible(scrub(line))
        if of_text is not None:
            second = coloured(second, of_text)
        print(f"{coloured(first, colour)} {second}")
