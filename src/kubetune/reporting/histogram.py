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
    """Return the bars of a histogram, also empty ones, so that gaps show. Those above `limit` are marked."""
    most = max((count for _, _, count in bars), default=0)
    drawn = []
    for low, high, count in bars:
        is_beyond = limit is not None and low > limit
        drawn.append(DrawnBar(low, high, count, count / max(1, most), is_beyond))
    return drawn


def shared_bars(*histograms: Sequence[Sequence[int]]) -> list[tuple[int, int, list[DrawnBar]]]:
    """Return lowest and highest value of each bar of any histogram, and how many each histogram has there.

    Empty bars between others are kept, so that gaps show. A histogram of few rows is as high as one of many: parts are
    of the largest share that any bar has of its histogram.
    """
    counts: dict[tuple[int, int], list[int]] = {}
    totals = [max(1, sum(count for _, _, count in bars)) for bars in histograms]
    for index, bars in enumerate(histograms):
        for low, high, count in bars:
            counts.setdefault((low, high), [0] * len(histograms))[index] = count

    most = 0.0
    for of_bar in counts.values():
        for count, total in zip(of_bar, totals, strict=True):
            most = max(most, count / total)

    rows = []
    for low, high in _without_gaps(sorted(counts)):
        drawn = []
        for count, total in zip(counts.get((low, high), [0] * len(totals)), totals, strict=True):
            drawn.append(DrawnBar(low, high, count, count / total / (most or 1), is_beyond=False))
        rows.append((low, high, drawn))
    return rows


def _without_gaps(bars: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return bars in their order, with those that no histogram has between two others.

    Example: between 1–10 and 31–40 are 11–20 and 21–30.
    """
    whole: list[tuple[int, int]] = []
    for low, high in bars:
        width = high - low + 1
        if whole:
            for begin in range(whole[-1][1] + 1, low, width):
                whole.append((begin, min(begin + width, low) - 1))
        whole.append((low, high))
    return whole
