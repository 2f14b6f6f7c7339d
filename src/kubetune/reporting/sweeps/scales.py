"""Positions of values on an axis: numbers evenly or by their logarithm, choices one above the other."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from kubetune.base.humanize import number

# Labels next to an axis. More would lie on top of each other.
_MOST_LABELS = 12
# A metric of which the largest value is so many times the smallest has a logarithmic axis.
_WIDE = 10


@dataclass(frozen=True)
class Tick:
    """A value that is written next to an axis."""

    height: float  # 0 at the bottom of the axis, 1 at the top
    label: str


@dataclass(frozen=True)
class NumberScale:
    """Numbers from `low` to `high`."""

    low: float
    high: float
    log: bool = False
    whole: bool = False  # integers only

    @classmethod
    def of_results(cls, results: Iterable[float]) -> Self | None:
        """Return the scale of a metric, on which all results have a place. None without a result.

        One trial that diverged would press all others together, so a wide span is logarithmic:

            1.2 1.3 1.4          evenly
            1.2 1.3 1.4 40       by the logarithm
        """
        values = sorted(results)
        if not values:
            return None
        low = values[0]
        high = values[-1]
        return cls(low, high, log=low > 0 and high / low >= _WIDE)

    def height(self, text: str) -> float | None:
        """Return how far up a value lies, 0 to 1; None if it is no number."""
        try:
            value = float(text)
        except ValueError:
            return None
        if not math.isfinite(value) or (self.log and value <= 0):
            return None
        # A lone value is in the middle.
        if self.high <= self.low:
            return 0.5
        low = self._scaled(self.low)
        return (self._scaled(value) - low) / (self._scaled(self.high) - low)

    def _scaled(self, value: float) -> float:
        """Return how far up a value is, before the axis is stretched to its height."""
        if self.log:
            return math.log(value)
        return value

    def ticks(self) -> list[Tick]:
        """Return ticks at numbers that are easy to read."""
        if self.high <= self.low:
            values = [self.low]
        elif self.log:
            values = self._decades()
        else:
            values = round_numbers(self.low, self.high, whole=self.whole)
        ticks = []
        for value in values:
            height = self.height(repr(value))
            assert height is not None, "ticks lie between low and high"
            label = number(value)
            # 0.0001 would be counted digit by digit.
            if 0 < value < 1e-3:
                label = f"{value:.3g}".replace("e-0", "e-")
                if self.log and math.log10(value).is_integer():
                    label = f"1e{round(math.log10(value))}"
            ticks.append(Tick(height, label))
        return ticks

    def _decades(self) -> list[float]:
        """Return powers of ten; of a span that holds fewer than three, its ends as well.

        1e-5 to 1e-2    1e-5, 1e-4, 1e-3, 1e-2
        3e-4 to 2e-3    3e-4, 1e-3, 2e-3
        """
        first = math.ceil(math.log10(self.low) - 1e-9)
        last = math.floor(math.log10(self.high) + 1e-9)
        decades = [10.0**exponent for exponent in range(first, last + 1)]
        # With very many, each second or third is enough.
        if len(decades) >= 3:
            return decades[:: math.ceil(len(decades) / _MOST_LABELS)]

        # A power of ten near an end would lie on top of it.
        values = [self.low, self.high]
        for decade in decades:
            height = self.height(repr(decade)) or 0.0
            if 0.1 < height < 0.9:
                values.append(decade)
        return sorted(values)


@dataclass(frozen=True)
class ChoiceScale:
    """Texts, one above the other, in the order in which they were typed."""

    texts: tuple[str, ...]

    def height(self, text: str) -> float | None:
        """Return how far up a choice lies, 0 to 1; None for any other value."""
        if text not in self.texts:
            return None
        if len(self.texts) == 1:
            return 0.5
        return self.texts.index(text) / (len(self.texts) - 1)

    def ticks(self) -> list[Tick]:
        """Return a tick for each choice; of very many, for some of them."""
        ticks = []
        for text in self.texts[:: math.ceil(len(self.texts) / _MOST_LABELS)]:
            height = self.height(text)
            assert height is not None, "it is one of them"
            label = text
            if len(text) > 20:
                label = f"{text[:19]}…"
            ticks.append(Tick(height, label))
        return ticks


Scale = NumberScale | ChoiceScale


def round_numbers(
    low: float,
    high: float,
    *,
    whole: bool = False,
) -> list[float]:
    """Return three to seven numbers between two that are easy to read, for the ticks of an axis.

    With `whole` they have no fractions, and may be only two.

        0.13 to 0.98    tenths are the size; a distance of 0.5 or 0.2 gives 1 or 4 ticks
        ticks           0.2, 0.4, 0.6, 0.8
    """
    # From the widest distance to the narrowest: the first with enough ticks is taken.
    size = 10.0 ** math.floor(math.log10(high - low))
    for factor in (5, 2, 1, 0.5, 0.2):
        distance = size * factor
        if whole:
            distance = max(distance, 1.0)
        # The smallest and the largest multiple of the distance that lie on the axis.
        first = math.ceil(low / distance - 1e-9)
        last = math.floor(high / distance + 1e-9)
        if last - first >= 2:
            break

    # Rounded, since 3 * 0.1 is 0.30000000000000004.
    return [float(f"{number * distance:.10g}") for number in range(first, last + 1)]
