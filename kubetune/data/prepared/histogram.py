"""A histogram of lengths, in bars of a round width."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    pass

_BARS = 24


def bars(lengths: Iterable[int], limit: int | None = None) -> list[list[int]]:
    """A histogram of lengths in tokens, in bars of one round width; where `limit` is given one ends with it."""
    values = np.fromiter(lengths, np.int64)
    if not len(values):
        return []
    width = _round_width(int(values.max()) / _BARS)
    last = math.ceil(int(values.max()) / width) * width
    edges = sorted({*range(0, last + 1, width), *([limit] if limit and 0 < limit < last else [])})
    counts, _ = np.histogram(values, [edge + 0.5 for edge in edges])
    pairs = zip(edges[:-1], edges[1:], counts, strict=True)
    found = [[low + 1, high, int(count)] for low, high, count in pairs]
    return _without_empty_ends(found)


def _without_empty_ends(found: Sequence[list[int]]) -> list[list[int]]:
    full = [i for i, (_, _, count) in enumerate(found) if count]
    return list(found[full[0] : full[-1] + 1]) if full else []


def _round_width(width: float) -> int:
    """The next of 1, 2, 5, 10, 20, 25, 50 … that is not smaller."""
    power = 10 ** max(0, math.floor(math.log10(max(width, 1))))
    return next(
        int(power * factor)
        for factor in (1, 2, 2.5, 5, 10)
        if power * factor >= width and power * factor % 1 == 0
    )
