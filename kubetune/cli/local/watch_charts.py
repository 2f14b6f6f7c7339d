"""Numbers as lines of a terminal: bars, and curves drawn with the eight dots of braille characters."""

from __future__ import annotations

from kubetune.base.humanize import Values, limits_of, thinned

_BRAILLE = 0x2800
# The bits of a braille character's dots, from top to bottom, in its left and in its right column.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def bar(percent: int, width: int = 10) -> str:
    """A share as a bar of blocks."""
    full = round(max(0, min(100, percent)) / 100 * width)
    return "█" * full + "░" * (width - full)


def curve(values: Values, width: int, height: int) -> list[str]:
    """Values as a line of dots, in `height` lines of `width` characters; a gap where none is known."""
    cells = _stretched(thinned(values, 2 * width), 2 * width)
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
        between = (
            None if left is None or right is None else left + (right - left) * rest / (width - 1)
        )
        cells.append(between if rest else left)
    return cells
