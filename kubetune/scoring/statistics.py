"""Certainty of measures: intervals of means, and whether two models differ on the same rows by more than chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 2000
FLIPS = 10_000
_CONFIDENCE = 0.95
_BLOCK = 2**20
"""Signs drawn at a time: those of many rows would fill the memory."""


def interval(scores: Sequence[float]) -> tuple[float, float]:
    """Bounds of the mean of `scores` `[rows]` by the percentile bootstrap (Efron 1979), the same each time.

    Where all are 0 or 1, Wilson's (1927), which is no point where all rows are right. NaN for no rows.
    """
    values = np.asarray(scores, np.float64)
    if not len(values):
        return math.nan, math.nan
    if np.isin(values, (0.0, 1.0)).all():
        return _wilson(int(values.sum()), len(values))
    draw = np.random.default_rng(0)
    # One sample at a time: all of them at once would take gigabytes of many rows.
    means = [values[draw.integers(0, len(values), len(values))].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [(1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2])
    return float(low), float(high)


def _wilson(right: int, rows: int) -> tuple[float, float]:
    from statistics import NormalDist

    z = NormalDist().inv_cdf((1 + _CONFIDENCE) / 2)
    share, scale = right / rows, 1 + z * z / rows
    middle = (share + z * z / (2 * rows)) / scale
    half = z * math.sqrt(share * (1 - share) / rows + z * z / (4 * rows * rows)) / scale
    # Rounding must not leave 7e-18 where none are right, nor a bound below 1 where all are.
    return middle - half if right else 0.0, middle + half if right < rows else 1.0


class Comparison(NamedTuple):
    """Two models on the same rows: `gained` were worse under the first, `lost` better; `p_value` of no difference."""

    difference: float
    gained: int
    lost: int
    p_value: float
    test: str


def compare(before: Sequence[float], after: Sequence[float], seed: int = 0) -> Comparison:
    """A paired test, two-sided, of scores `[rows]` of the same rows.

    McNemar's exact test (1947) where all are 0 or 1; else signs of the differences are flipped at random (Fisher 1935),
    `FLIPS` times.
    """
    first, second = np.asarray(before, np.float64), np.asarray(after, np.float64)
    if first.shape != second.shape:
        raise ValueError(f"scores of {len(first)} and {len(second)} rows; expected the same rows")
    change = second - first
    gained, lost = int((change > 0).sum()), int((change < 0).sum())
    mean = float(change.mean()) if len(change) else math.nan
    if np.isin(np.concatenate([first, second]), (0.0, 1.0)).all():
        return Comparison(mean, gained, lost, _mcnemar(gained, lost), "McNemar")
    draw, seen, as_far = np.random.default_rng(seed), abs(change.sum()) - 1e-12, 0
    rows = len(change)
    at_a_time = max(1, _BLOCK // rows)
    for done in range(0, FLIPS, at_a_time):
        signs = 1 - 2.0 * draw.integers(0, 2, (min(at_a_time, FLIPS - done), rows), dtype=np.int8)
        as_far += int((np.abs(signs @ change) >= seen).sum())
    # One more on both sides: the order that was seen is one of all.
    return Comparison(mean, gained, lost, (as_far + 1) / (FLIPS + 1), "paired permutation")


def _mcnemar(gained: int, lost: int) -> float:
    """Twice the share of fair coin throws that are so uneven."""
    throws = gained + lost
    tail = sum(math.comb(throws, k) for k in range(min(gained, lost) + 1))
    return min(
        1.0, 2 * tail / (1 << throws)
    )  # of whole numbers: 2.0**1024 is too large for a float
