"""Long columns of numbers made short enough for a page, without hiding what was rare.

Above a number of points, neighbours share a bucket that keeps their mean, lowest and highest: a spike in one step of
a hundred thousand stays visible in the band.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


class Thinner:
    """A column of any length made short while it is read: between half of `points` and all of them are left.

    Neighbours are put together two by two as often as there are too many, so that memory does not grow.
    """

    def __init__(self, points: int) -> None:
        self._points, self._size, self._open = points, 1, _Bucket()
        self._buckets: list[_Bucket] = []

    def extend(self, steps: Sequence[int], values: Sequence[Number]) -> None:
        """Add values, None for one that is not finite, with their steps."""
        at = 0
        while at < len(steps):
            end = at + self._size - self._open.count
            self._open.add(steps[at:end], values[at:end])
            at = min(end, len(steps))
            if self._open.count == self._size:
                self._buckets.append(self._open)
                self._open = _Bucket()
                if len(self._buckets) > self._points:
                    self._halve()

    def _halve(self) -> None:
        pairs = [self._buckets[at : at + 2] for at in range(0, len(self._buckets), 2)]
        self._size *= 2
        if len(pairs[-1]) == 1:
            self._open = pairs.pop()[0]
        self._buckets = [first.joined(second) for first, second in pairs]

    def series(self) -> Series | None:
        """The value added; None where no value was finite."""
        found = [*self._buckets, *([self._open] if self._open.count else [])]
        if not any(bucket.known for bucket in found):
            return None
        steps, means = [bucket.step for bucket in found], [_digits(bucket.mean) for bucket in found]
        if self._size == 1:
            return Series(steps, means)
        return Series(
            steps,
            means,
            [_digits(bucket.low) for bucket in found],
            [_digits(bucket.high) for bucket in found],
        )


@dataclass
class _Bucket:
    """Neighbours of a column: how many, how many of them finite, and what is shown of these. `step`: the last one's."""

    step: int = 0
    count: int = 0
    known: int = 0
    total: float = 0
    low: Number = None
    high: Number = None

    def add(self, steps: Sequence[int], values: Sequence[Number]) -> None:
        self.count, self.step = self.count + len(steps), steps[-1]
        try:
            total = math.fsum(values) if len(values) > 1 else values[0]  # type: ignore[arg-type]
            known: Sequence[Any] = () if total is None else values
        except TypeError:  # one of them is None
            known = [value for value in values if value is not None]
            total = math.fsum(known) if len(known) > 1 else known[0] if known else None
        if known and total is not None:
            self._take(len(known), total, min(known), max(known))

    def joined(self, other: _Bucket) -> _Bucket:
        """Both as one, `other` being the later."""
        self.count, self.step = self.count + other.count, other.step
        if other.low is not None and other.high is not None:
            self._take(other.known, other.total, other.low, other.high)
        return self

    def _take(self, known: int, total: float, low: float, high: float) -> None:
        self.known, self.total = self.known + known, self.total + total
        self.low = low if self.low is None else min(self.low, low)
        self.high = high if self.high is None else max(self.high, high)

    @property
    def mean(self) -> Number:
        return None if not self.known else self.total / self.known if self.known > 1 else self.total


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
