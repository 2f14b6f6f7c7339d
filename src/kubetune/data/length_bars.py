"""A histogram of lengths, in bars of a round width."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

_BARS = 24


def bars(
    lengths: Iterable[int], limit: int | None = None, longest: int | None = None
) -> list[list[int]]:
    """Return a histogram of lengths in tokens: `[shortest, longest, rows]` for each bar.

    All bars have the same round width, and empty bars at both ends are left out. The bar that `limit` falls into is
    cut there, so that the bars also tell how many rows are longer than the limit. `longest`: of all histograms that are
    to have the same bars.

    Example: lengths 3, 120 and 130 with the limit 125 have bars of 10 tokens:
        [1, 10, 1], [11, 20, 0], …, [111, 120, 1], [121, 125, 0], [126, 130, 1]
    """
    values = np.fromiter(lengths, np.int64)
    if not len(values):
        return []

    longest = longest or int(values.max())
    width = _round_width(longest / _BARS)
    last = math.ceil(longest / width) * width
    edges = set(range(0, last + 1, width))
    if limit is not None and 0 < limit < last:
        edges.add(limit)
    borders = sorted(edges)

    # A bar counts the lengths from low + 1 to high, so it begins half a token above low.
    counts, _ = np.histogram(values, [border + 0.5 for border in borders])
    filled = np.flatnonzero(counts)
    if not len(filled):
        return []
    histogram = []
    for bar in range(int(filled[0]), int(filled[-1]) + 1):
        histogram.append([borders[bar] + 1, borders[bar + 1], int(counts[bar])])
    return histogram


def _round_width(width: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, 25, 50 … that is at least `width`."""
    exponent = max(0, math.floor(math.log10(max(width, 1))))
    power = int(10**exponent)
    for factor in (1, 2, 2.5, 5):
        rounded = power * factor
        is_whole = rounded % 1 == 0  # 2.5 is no width, 25 is
        if rounded >= width and is_whole:
            return int(rounded)
    return 10 * power
