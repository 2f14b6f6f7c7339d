"""Make long columns of numbers short enough for a page, without hiding what was rare.

Neighbours share a bucket that keeps their mean, lowest and highest value. So a spike in one step of a
hundred thousand stays visible in the band.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# None stands for a value that is not finite.
Number = float | int | None


@dataclass(frozen=True)
class Series:
    """Values over steps."""

    steps: list[int]
    values: list[Number]  # as many as steps
    low: list[Number] | None = None  # only where `values` are means of several values each
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
            self._open.add(steps[begin:end], values[begin:end])
            begin = min(end, len(steps))
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

        # A bucket is None only if all its values are.
        steps = [bucket.step for bucket in buckets]
        means = [_rounded(bucket.mean) for bucket in buckets]

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
    low: Number = None
    high: Number = None

    def add(self, steps: Sequence[int], values: Sequence[Number]) -> None:
        """Add values that come after those of the bucket."""
        self.step = steps[-1]
        self.count += len(steps)
        # math.fsum rounds once, so that a mean does not depend on how a column was cut into buckets.
        finite = [value for value in values if value is not None]
        if finite:
            self._add_finite(len(finite), math.fsum(finite), min(finite), max(finite))

    def join(self, later: _Bucket) -> None:
        """Add another bucket's values, which come after those of this one."""
        self.step = later.step
        self.count += later.count
        # A bucket without a finite value has no extremes to compare with.
        if later.low is not None and later.high is not None:
            self._add_finite(later.finite, later.total, later.low, later.high)

    def _add_finite(
        self,
        count: int,
        total: float,
        low: float,
        high: float,
    ) -> None:
        """Add so many finite values by their sum, lowest and highest."""
        self.finite += count
        self.total += total
        if self.low is None or low < self.low:
            self.low = low
        if self.high is None or high > self.high:
            self.high = high

    @property
    def mean(self) -> Number:
        """The mean of the finite values, or None if there are none."""
        if self.finite == 0:
            return None
        return self.total / self.finite


def merge(parts: Sequence[Series], columns: Sequence[Sequence[Number]]) -> list[list[Number]]:
    """Return the steps of all parts, and each part's column on these steps. None where a part lacks a step.

    parts     steps 1 2, column a b  ·  steps 2 3, column c d
    result    [1 2 3]  [a b –]  [– c d]
    """
    all_steps: set[int] = set()
    for part in parts:
        all_steps.update(part.steps)
    axis = sorted(all_steps)

    result: list[list[Number]] = [list(axis)]
    for part, column in zip(parts, columns, strict=True):
        value_at = dict(zip(part.steps, column, strict=True))
        result.append([value_at.get(step) for step in axis])
    return result


def _rounded(value: Number) -> Number:
    """Return five digits of a value: more than an eye sees, and half the bytes."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    return value
