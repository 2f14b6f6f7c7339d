"""Long columns of numbers made short enough for a page, without hiding what was rare.

Above a number of points, neighbours share a bucket that keeps their mean, lowest and highest: a spike in one step of
a hundred thousand stays visible in the band.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Number = float | int | None


@dataclass(frozen=True)
class Series:
    """Values over steps. `low` and `high` are there only where `values` are means of several."""

    steps: list[int]
    values: list[Number]
    low: list[Number] | None = None
    high: list[Number] | None = None


def shorten(steps: Sequence[int], values: Sequence[Number], points: int) -> Series:
    """At most `points` of them: all, or means of buckets with their lowest and highest. None (not finite) is left out,
    and is None again where nothing else is in a bucket."""
    if len(steps) <= points:
        return Series(list(steps), [_digits(value) for value in values])
    size = math.ceil(len(steps) / points)
    result = Series([], [], [], [])
    assert result.low is not None
    assert result.high is not None
    for begin in range(0, len(steps), size):
        known = [value for value in values[begin : begin + size] if value is not None]
        result.steps.append(steps[min(begin + size, len(steps)) - 1])
        result.values.append(_digits(math.fsum(known) / len(known)) if known else None)
        result.low.append(_digits(min(known)) if known else None)
        result.high.append(_digits(max(known)) if known else None)
    return result


def smooth(values: Sequence[Number], span: float) -> list[Number]:
    """Exponential moving average whose weights sum to one from the first value on. `span`: values it looks back."""
    keep, total, weight = 1 - 1 / max(1.0, span), 0.0, 0.0
    result: list[Number] = []
    for value in values:
        if value is not None:
            total, weight = keep * total + (1 - keep or 1) * value, keep * weight + (1 - keep or 1)
        result.append(total / weight if weight else None)
    return result


def merge(parts: Sequence[Series], columns: Sequence[Sequence[Number]]) -> list[list[Number]]:
    """One common axis of steps and, for each part, its column on that axis; None where a part has no such step."""
    axis = sorted({step for part in parts for step in part.steps})
    where = {step: index for index, step in enumerate(axis)}
    result: list[list[Number]] = [list(axis)]
    for part, column in zip(parts, columns, strict=True):
        row: list[Number] = [None] * len(axis)
        for step, value in zip(part.steps, column, strict=True):
            row[where[step]] = value
        result.append(row)
    return result


def _digits(value: Number) -> Number:
    """Five digits are more than an eye sees, and half the bytes."""
    return float(f"{value:.5g}") if isinstance(value, float) else value
