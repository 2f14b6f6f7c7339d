"""Certainty of measures: intervals of means, and whether two models differ on the same rows by more than chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kubetune.rundir.intervals import CONFIDENCE, FLIPS, mcnemar, wilson

# Samples of the bootstrap.
RESAMPLES = 2000
# Signs drawn at a time: those of many rows would fill the memory.
_BLOCK = 2**20


def interval(scores: Sequence[float]) -> tuple[float, float]:
    """Return the bounds of the mean of `scores` `[rows]` by the percentile bootstrap (Efron 1979), the same each time.

    If all are 0 or 1, Wilson's (1927), which is no single point if all rows are right. NaN for no rows.
    """
    values = np.asarray(scores, np.float64)
    if not len(values):
        return math.nan, math.nan
    if np.isin(values, (0.0, 1.0)).all():
        return wilson(float(values.mean()), len(values))

    # A seed of its own, so that the same answers always have the same interval.
    draw = np.random.default_rng(0)
    means = []
    # One sample at a time: all of them at once would take gigabytes of many rows.
    for _ in range(RESAMPLES):
        sample = values[draw.integers(0, len(values), len(values))]
        means.append(sample.mean())

    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


class Comparison(NamedTuple):
    """Two models on the same rows."""

    difference: float  # mean of the second model's scores minus the first's
    gained: int  # rows on which the second is better
    lost: int  # rows on which the first is better
    p_value: float  # of so large a difference if the models are equally good
    test: str  # its name


def compare(
    before: Sequence[float],
    after: Sequence[float],
    seed: int = 0,
) -> Comparison:
    """Test, two-sided and paired, whether scores `[rows]` of the same rows differ.

    McNemar's exact test (1947) if all are 0 or 1; else signs of the differences are flipped at random (Fisher 1935),
    `FLIPS` times:

        before  0.2 0.5 0.9    after  0.6 0.7 0.8    change +0.4 +0.2 -0.1, sum 0.5
        flipped sums are ±0.4 ±0.2 ±0.1; the p-value is the share of them that are 0.5 or more away from 0
    """
    first = np.asarray(before, np.float64)
    second = np.asarray(after, np.float64)
    if first.shape != second.shape:
        raise ValueError(f"scores of {len(first)} and {len(second)} rows; expected the same rows")
    change = second - first

    # Ties, rows on which both are as good, count for neither.
    gained = int((change > 0).sum())
    lost = int((change < 0).sum())
    mean = float(change.mean()) if len(change) else math.nan
    if np.isin(np.concatenate([first, second]), (0.0, 1.0)).all():
        return Comparison(
            mean,
            gained,
            lost,
            mcnemar(gained, lost),
            "McNemar",
        )

    # How many sums of flipped changes are as far from 0 as the sum that was seen.
    draw = np.random.default_rng(seed)
    distance = abs(change.sum()) - 1e-12  # equal sums of another order may differ by rounding
    as_far = 0
    rows = len(change)
    at_a_time = max(1, _BLOCK // rows)
    for start in range(0, FLIPS, at_a_time):
        number = min(at_a_time, FLIPS - start)
        signs = 1 - 2.0 * draw.integers(0, 2, (number, rows), dtype=np.int8)
        as_far += int((np.abs(signs @ change) >= distance).sum())

    # One more on both sides: the order that was seen is one of all.
    return Comparison(
        mean,
        gained,
        lost,
        (as_far + 1) / (FLIPS + 1),
        "paired permutation",
    )
