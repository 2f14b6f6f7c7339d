"""What is made of the measurements: best epoch of a run, median and range over repeats, ratios within a repeat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

Measurement = dict[str, Any]


@dataclass(frozen=True)
class Spread:
    """Median, least and most over repeats."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """None when there are no values."""
        found = sorted(values)
        return cls(median(found), found[0], found[-1]) if found else None


def is_measured(measurement: Measurement) -> bool:
    """Whether it has numbers; otherwise it says why not."""
    return "missing" not in measurement and "failed" not in measurement


def tokens_per_cpu_second(measurement: Measurement) -> float:
    """Non-padding tokens per CPU-second of one process, in the best epoch after the first, which warms up."""
    return _best(measurement["tokens_per_epoch"], measurement["epoch_cpu_seconds"])


def tokens_per_second(measurement: Measurement) -> float:
    """Non-padding tokens per second by the wall, of all processes together, in the best epoch after the first."""
    return _best(measurement["tokens_per_epoch"], measurement["epoch_seconds"])


def _best(tokens: int, seconds: Sequence[float]) -> float:
    return tokens / min(seconds[1:])


def epoch_losses(measurement: Measurement) -> tuple[float, float]:
    """Mean loss of the steps of the first epoch and of the last: trainers differ in the order of rows, not in rows."""
    losses, epochs = measurement["losses"], len(measurement["epoch_seconds"])
    steps = len(losses) // epochs
    return fmean(losses[:steps]), fmean(losses[-steps:])


def ratios(
    ours: Sequence[Measurement], theirs: Sequence[Measurement], quantity: Any
) -> list[float]:
    """Ours divided by theirs in each repeat, whose runs were neighbours in time; unmeasured ones are left out."""
    other = {m["repeat"]: quantity(m) for m in theirs if is_measured(m)}
    return [
        quantity(m) / other[m["repeat"]] for m in ours if is_measured(m) and m["repeat"] in other
    ]
