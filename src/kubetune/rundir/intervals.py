"""How sure a measured share is, for those who judge answers and for pages that know only the share."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Final

CONFIDENCE: Final = 0.95


def wilson(share: float, rows: int) -> tuple[float, float]:
    """Return the bounds of a share of rows (Wilson 1927). 8 of 10 right: 0.49 to 0.94; 10 of 10 right: 0.72 to 1."""
    # 1.96 for 95 %.
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)

    # The bounds solve |share - p| = z √(p (1 - p) / rows) for p.
    scale = 1 + z * z / rows
    middle = (share + z * z / (2 * rows)) / scale
    half = z * math.sqrt(share * (1 - share) / rows + z * z / (4 * rows * rows)) / scale
    # Rounding must not leave 7e-18 if no row is right, nor a bound below 1 if all are.
    low = middle - half if share > 0 else 0.0
    high = middle + half if share < 1 else 1.0
    return low, high
