"""Bars of a histogram of lengths, as a page shows them."""

from __future__ import annotations

from collections.abc import Sequence

Bar = Sequence[int]  # lowest value, first value above it, count

# Lowest and highest value, count, share of the highest count, True if it lies beyond the limit.
DrawnBar = tuple[int, int, int, float, bool]


def drawn_bars(bars: Sequence[Bar], limit: int | None = None) -> list[DrawnBar]:
    """Return the bars as templates draw them."""
    # At least 1, since all bars may be empty.
    most = max([1, *(count for _, _, count in bars)])
    drawn = []
    for low, high, count in bars:
        is_beyond = limit is not None and low > limit
        drawn.append((low, high, count, count / most, is_beyond))
    return drawn


def fold(bars: Sequence[Bar], limit: int | None = None) -> list[Bar]:
    """Join every run of three or more empty bars into one. No joined bar reaches across `limit`.

    bars    0–8: 5   8–16: 0   16–24: 0   24–32: 0   32–40: 2
    folded  0–8: 5   8–32: 0                         32–40: 2
    """
    folded: list[Bar] = []
    empty: list[Bar] = []  # the empty bars since the last one that is not
    for bar in bars:
        is_empty = not bar[2]
        ends_at_limit = bool(empty) and limit is not None and empty[-1][1] == limit
        if not is_empty or ends_at_limit:
            folded += _joined(empty)
            empty = []
        if is_empty:
            empty.append(bar)
        else:
            folded.append(bar)

    return folded + _joined(empty)


def _joined(empty: list[Bar]) -> list[Bar]:
    """Return neighbouring empty bars as one, or as they are where they are few."""
    if len(empty) < 3:
        return list(empty)
    return [[empty[0][0], empty[-1][1], 0]]
