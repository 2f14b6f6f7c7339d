"""How sure a measured share or mean is, for those who judge answers and for pages that know only these."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Final

CONFIDENCE: Final = 0.95
# Flips of signs of the permutation test: one in so many, and the order that was seen, is its lowest p-value.
FLIPS: Final = 10_000


def wilson(share: float, rows: int) -> tuple[float, float]:
    """Return the bounds of a share of rows (Wilson 1927). 8 of 10 right: 0.49 to 0.94; 10 of 10 right: 0.72 to 1."""
    z = _deviations()
    # The bounds solve |share - p| = z √(p (1 - p) / rows) for p.
    scale = 1 + z * z / rows
    middle = (share + z * z / (2 * rows)) / scale
    half = z * math.sqrt(share * (1 - share) / rows + z * z / (4 * rows * rows)) / scale
    # Rounding must not leave 7e-18 if no row is right, nor a bound below 1 if all are.
    low = middle - half if share > 0 else 0.0
    high = middle + half if share < 1 else 1.0
    return low, high


def mean_interval(mean: float, deviation: float, rows: int) -> tuple[float, float]:
    """Return the bounds of a mean of rows with this standard deviation. 1 of 100 rows, 0.5: 0.902 to 1.098."""
    half = _deviations() * deviation / math.sqrt(rows)
    return mean - half, mean + half


def mcnemar(gained: int, lost: int) -> float:
    """Return twice the share of throws of a fair coin that are so uneven: the p-value of McNemar's exact test (1947).

    3 gained, 1 lost: of the 16 ways that 4 throws fall, 5 have at most 1 of the rarer side, so 2 · 5 / 16 = 0.625.
    """
    throws = gained + lost
    tail = sum(math.comb(throws, k) for k in range(min(gained, lost) + 1))
    # Whole numbers are divided: 2.0**1024 is too large for a float.
    return min(1.0, 2 * tail / (1 << throws))


def highest_p(before: int, after: int, rows: int) -> float:
    """Return the highest p-value that McNemar's test can have where only the numbers of right rows are known.

    30 of 100 right before, 70 after: at most 30 rows got worse, while 70 got better, so p is at most mcnemar(70, 30).
    """
    lost = min(before, rows - after)
    return mcnemar(lost + after - before, lost)


def p_in_words(p_value: float, test: str = "", *, is_highest: bool = False) -> str:
    """Return `p = 2e-28`, or `p ≤ 0.0001` where it may be lower: a permutation test has a lowest one that it can see."""
    is_floor = test.endswith("permutation") and p_value < 1.5 / FLIPS
    return f"p {'≤' if is_highest or is_floor else '='} {p_value:.2g}"


def _deviations() -> float:
    """Return how many standard deviations the bounds lie from the middle: 1.96 for 95 %."""
    return NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
