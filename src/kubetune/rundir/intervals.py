"""How sure a measured share or mean is, for those who judge answers and for pages that know only these."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Final

CONFIDENCE: Final = 0.95


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


def _deviations() -> float:
    """Return how many standard deviations the bounds lie from the middle: 1.96 for 95 %."""
    return NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
