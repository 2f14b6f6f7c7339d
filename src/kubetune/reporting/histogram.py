"""Bars of a histogram of lengths, as a page shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class DrawnBar(NamedTuple):
    """A bar as templates draw it."""

    low: int  # lowest and highest value
    high: int
    rows: int  # how many there are
    part: float  # of the highest of these numbers
    is_beyond: bool  # above the limit


def drawn_bars(bars: Sequence[Sequence[int]], limit: int | None = None) -> list[DrawnBar]:
    """Return the bars of a histogram that are not empty. Those above `limit` are marked."""
    most = max((count for _, _, count in bars), default=0)
    drawn = []
    for low, high, count in bars:
        if count:
            is_beyond = limit is not None and low > limit
            drawn.append(DrawnBar(low, high, count, count / most, is_beyond))
    return drawn


def shared_bars(*histograms: Sequence[Sequence[int]]) -> list[tuple[int, int, list[DrawnBar]]]:
    """Return lowest and highest value of each bar of any histogram, and how many each histogram has there.

    Empty bars between others are kept, so that gaps show. Parts are of the highest number of all histograms.
    """
    counts: dict[tuple[int, int], list[int]] = {}
    for index, bars in enumerate(histograms):
        for low, high, count in bars:
            counts.setdefault((low, high), [0] * len(histograms))[index] = count
    most = max((count for of_bar in counts.values() for count in of_bar), default=0)
    rows = []
    for (low, high), of_bar in sorted(counts.items()):
        drawn = [DrawnBar(low, high, count, count / most, is_beyond=False) for count in of_bar]
        rows.append((low, high, drawn))
    return rows
