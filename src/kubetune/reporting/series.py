"""Make long columns of numbers short enough for a page, without hiding what was rare.

Neighbours share a bucket that keeps their mean, lowest and highest value. So a spike in one step of a
hundred thousand stays visible in the band.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

# None stands for a value that is not finite.
Number = float | int | None
# Steps, and as many values.
Column = tuple[Sequence[int], Sequence[Number]]


@dataclass(frozen=True)
class Series:
    """Values over steps."""

    steps: list[int]
    values: list[Number]  # as many as steps
    low: list[Number] | None = None  # only if `values` are means of several values each
    high: list[Number] | None = None


def shorten(
    steps: Sequence[int],
    values: Sequence[Number],
    points: int,
) -> Series | None:
    """Return a column with about `points` points at most, or None if no value is finite."""
    thinner = Thinner(points)
    thinner.extend(steps, values)
    return thinner.series()


class Thinner:
    """A column of any length, made short while it is read. At the end it has between half of `points` and `points`.

    Whenever there are more than `points` buckets, neighbours are joined two by two, so memory does not grow:

        points 4    1 2 3 4 | 5 →  (1 2) (3 4) (5 …  →  (1 2) (3 4) (5 6) (7 8) | 9  →  (1 2 3 4) …
    """

    def __init__(self, points: int) -> None:
        self._points = points
        self._size = 1  # values of a full bucket
        self._buckets: list[_Bucket] = []  # all full
        self._open = _Bucket()  # the last one, which is not full yet

    def extend(self, steps: Sequence[int], values: Sequence[Number]) -> None:
        """Add values with their steps. None stands for a value that is not finite."""
        begin = 0
        while begin < len(steps):
            # As many values as the open bucket still takes.
            end = begin + self._size - self._open.count
            self._open.join(_Bucket.of(steps[begin:end], values[begin:end]))
            begin = end
            if self._open.count == self._size:
                self._buckets.append(self._open)
                self._open = _Bucket()
                if len(self._buckets) > self._points:
                    self._halve()

    def _halve(self) -> None:
        """Join neighbouring buckets two by two."""
        self._size *= 2
        if len(self._buckets) % 2:
            self._open = self._buckets.pop()  # half of a bucket of the new size

        firsts = self._buckets[0::2]
        for first, second in zip(firsts, self._buckets[1::2], strict=True):
            first.join(second)
        self._buckets = firsts

    def series(self) -> Series | None:
        """Return the column so far, or None if no value was finite."""
        # The open bucket counts too, though more values may come.
        buckets = list(self._buckets)
        if self._open.count:
            buckets.append(self._open)
        if not any(bucket.finite for bucket in buckets):
            return None

        # A bucket is None only if all its values are: a number by NaN is NaN.
        steps = [bucket.step for bucket in buckets]
        means = [_rounded(bucket.total / (bucket.finite or math.nan)) for bucket in buckets]

        # Without joined values there is no band.
        if self._size == 1:
            return Series(steps, means)
        lows = [_rounded(bucket.low) for bucket in buckets]
        highs = [_rounded(bucket.high) for bucket in buckets]
        return Series(steps, means, lows, highs)


@dataclass
class _Bucket:
    """Values of neighbouring steps, as their number, sum, lowest and highest."""

    step: int = 0  # the last one
    count: int = 0
    finite: int = 0  # how many of the values are finite; the sum and the extremes are of these
    total: float = 0
    low: float = math.inf
    high: float = -math.inf

    @classmethod
    def of(cls, steps: Sequence[int], values: Sequence[Number]) -> _Bucket:
        """Return a bucket of these values."""
        finite = [value for value in values if value is not None]
        # math.fsum rounds once, so that a mean does not depend on how a column was cut into buckets.
        total = math.fsum(finite)
        low = min(finite, default=math.inf)
        high = max(finite, default=-math.inf)
        return cls(steps[-1], len(steps), len(finite), total, low, high)

    def join(self, later: _Bucket) -> None:
        """Add another bucket's values, which come after this one's."""
        self.step = later.step
        self.count += later.count
        self.finite += later.finite
        self.total += later.total
        self.low = min(self.low, later.low)
        self.high = max(self.high, later.high)


def merge(columns: Sequence[Column]) -> list[list[Number]]:
    """Return the steps of all columns, and the values of each on these steps. None if it lacks a step.

    columns   steps 1 2, values a b  ·  steps 2 3, values c d
    result    [1 2 3]  [a b –]  [– c d]
    """
    all_steps: set[int] = set()
    for steps, _ in columns:
        all_steps.update(steps)
    axis = sorted(all_steps)

    result: list[list[Number]] = [list(axis)]
    for steps, values in columns:
        value_at = dict(zip(steps, values, strict=True))
        result.append([value_at.get(step) for step in axis])
    return result


def spread(items: Sequence[T], most: int) -> list[T]:
    """Return at most so many of the items, evenly spread from the first to the last."""
    if len(items) <= most:
        return list(items)
    # No whole number: of 100 items 10 are the first, the 12th, the 23rd, …, the last.
    stride = (len(items) - 1) / (most - 1)
    return [items[round(place * stride)] for place in range(most)]


def _rounded(value: float) -> Number:
    """Return five digits of a value, more than an eye sees, at half the bytes. None if it is not finite."""
    if not math.isfinite(value):
        return None
    if isinstance(value, float):
        return float(f"{value:.5g}")
    return value
