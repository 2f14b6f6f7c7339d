"""Tables and labelled facts on the terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from kubetune.base.humanize import visible
from kubetune.base.logs import scrub

_NARROWEST = 8
"""Of a column whose cells go on below themselves."""


def print_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as they need to be; where a terminal is narrower, cells go on below themselves.

    Nothing is cut off, so that everything can be searched and copied.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(visible(scrub("\n".join(table(head, rows, width)))))


def table(
    head: Sequence[str], rows: Sequence[Sequence[object]], width: int | None = None
) -> Iterator[str]:
    """The lines of a table, in `width` columns of a terminal if need be and if its words allow."""
    lines = [list(head), *([("" if cell is None else str(cell)) for cell in row] for row in rows)]
    # A row that is shorter ends with a sentence, which may be as long as it likes.
    cells = [line if len(line) == len(head) else line[:-1] for line in lines]
    widths = [
        max(len(line[column]) for line in cells if column < len(line))
        for column in range(len(head))
    ]
    least = [max(len(name), _NARROWEST) for name in head]
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
        wide = [column for column, one in enumerate(widths) if one > least[column]]
        if not wide:
            break
        folds = {n: sum(len(line[n]) >= widths[n] for line in cells if n < len(line)) for n in wide}
        widths[min(wide, key=lambda n: (folds[n], -widths[n]))] -= 1
    for line in lines:
        folded = [_fold(cell, one) for cell, one in zip(line, widths, strict=False)]
        if len(line) < len(head):
            folded[-1] = line[-1:]
        for parts in zip_longest(*folded, fillvalue=""):
            yield "  ".join(
                part.ljust(one) for part, one in zip(parts, widths, strict=False)
            ).rstrip()


def print_fact(label: str, text: str, width: int) -> None:
    """A fact behind its label of `width` columns; on a terminal it goes on below itself."""
    lines = [text]
    if sys.stdout.isatty():
        lines = _fold(
            text, max(shutil.get_terminal_size().columns - width - 1, _NARROWEST), breaks=False
        )
    for name, line in zip_longest([label], lines, fillvalue=""):
        print(visible(scrub(f"{name:<{width}} {line}")))


def _fold(text: str, width: int, *, breaks: bool = True) -> list[str]:
    """A text in lines, at least one. `breaks`: words that are too long are broken; else they stay, to be copied."""
    if len(text) <= width:
        return [text]
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=breaks)
