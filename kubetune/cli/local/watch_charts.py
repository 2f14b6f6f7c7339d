"""Numbers as lines of a terminal: sparklines, bars, and curves drawn with the eight dots of braille characters."""

from __future__ import annotations

from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"
_BRAILLE = 0x2800
# The bits of a braille character's dots, from top to bottom, in its left and in its right column.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))

Values = Sequence[float | None]


def sparkline(values: Values, width: int) -> str:
    """Values as blocks of eight heights, at most `width` of them; neighbours share one. A gap where none is known."""
    cells = _thinned(values, width)
    if (limits := limits_of(cells)) is None:
        return " " * len(cells)
    low, span = limits[0], limits[1] - limits[0]
    return "".join(
        " " if cell is None else _BLOCKS[round((cell - low) / span * (len(_BLOCKS) - 1)) if span else 0]
        for cell in cells
    )


def limits_of(values: Values) -> tuple[float, float] | None:
    """The smallest and the largest of the values that are known."""
    known = [value for value in values if value is not None]
    return (min(known), max(known)) if known else None


def bar(percent: int, width: int = 10) -> str:
    """A share as a bar of blocks."""
    full = round(max(0, min(100, percent)) / 100 * width)
    return "█" * full + "░" * (width - full)


def curve(values: Values, width: int, height: int) -> list[str]:
    """Values as a line of dots, in `height` lines of `width` characters; a gap where none is known."""
    cells = _stretched(_thinned(values, 2 * width), 2 * width)
    limits, rows = limits_of(cells), 4 * height
    if limits is None or height < 1:
        return []
    low, span = limits[0], limits[1] - limits[0]
    codes = [[0] * ((len(cells) + 1) // 2) for _ in range(height)]
    last: int | None = None
    for column, cell in enumerate(cells):
        if cell is None:
            last = None
            continue
        row = rows - 1 - round((cell - low) / span * (rows - 1)) if span else rows // 2
        # All dots from where the last value was: a steep line stays one.
        start = row if last is None else last + (row > last) - (row < last)
        for dot in range(min(start, row), max(start, row) + 1):
            codes[dot // 4][column // 2] |= _DOTS[column % 2][dot % 4]
        last = row
    return ["".join(chr(_BRAILLE + code) for code in line) for line in codes]


def _stretched(values: Values, width: int) -> list[float | None]:
    """Two or more values, spread over `width` of them in straight lines; none between what is not known."""
    if not 1 < len(values) < width:
        return list(values)
    cells: list[float | None] = []
    for column in range(width):
        at, rest = divmod(column * (len(values) - 1), width - 1)
        left, right = values[at], values[min(at + 1, len(values) - 1)]
        between = None if left is None or right is None else left + (right - left) * rest / (width - 1)
        cells.append(between if rest else left)
    return cells


def _thinned(values: Values, width: int) -> list[float | None]:
    """At most `width` values, each the mean of what is known of some neighbours."""
    count = min(max(0, width), len(values))
    cells: list[float | None] = []
    for index in range(count):
        part = [v for v in values[index * len(values) // count : (index + 1) * len(values) // count] if v is not None]
        cells.append(sum(part) / len(part) if part else None)
    return cells
