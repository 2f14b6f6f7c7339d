"""Numbers made of measurements: best epoch of a run, median and range over repeats, ratios within a repeat."""

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
        """Return the spread of some values, None if there are none."""
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(median(ordered), ordered[0], ordered[-1])


def is_measured(measurement: Measurement) -> bool:
    """True if it has numbers; otherwise it has the reason why not."""
    return "missing" not in measurement and "failed" not in measurement


def grouped(
    measurements: Iterable[Measurement], names: Sequence[str]
) -> dict[tuple[Any, ...], list[Measurement]]:
    """Return measurements by the values of these facts, in the order of their first ones.

    By (trainer, threads): {("kubetune", 1): [repeat 0, repeat 1], ("trl-best", 1): [repeat 0]}.
    """
    groups: dict[tuple[Any, ...], list[Measurement]] = {}
    for measurement in measurements:
        key = tuple(measurement[name] for name in names)
        groups.setdefault(key, []).append(measurement)
    return groups


def tokens_per_cpu_second(measurement: Measurement) -> float:
    """Return non-padding tokens per CPU-second of one process, in the best epoch after the first, which warms up."""
    return _best(measurement["tokens_per_epoch"], measurement["epoch_cpu_seconds"])


def tokens_per_second(measurement: Measurement) -> float:
    """Return non-padding tokens per second by the wall, of all processes, in the best epoch after the first."""
    return _best(measurement["tokens_per_epoch"], measurement["epoch_seconds"])


def _best(tokens: int, seconds: Sequence[float]) -> float:
    return tokens / min(seconds[1:])


def epoch_losses(measurement: Measurement) -> tuple[float, float]:
    """Return the mean loss of the steps of the first epoch and of the last.

    Single steps cannot be compared: trainers take the rows in other orders.
    """
    losses = measurement["losses"]
    steps = len(losses) // len(measurement["epoch_seconds"])
    return fmean(losses[:steps]), fmean(losses[-steps:])


def ratios(
    ours: Sequence[Measurement], theirs: Sequence[Measurement], quantity: Any
) -> list[float]:
    """Return ours divided by theirs in each repeat that measured both. Runs of a repeat were neighbours in time."""
    their_values = {m["repeat"]: quantity(m) for m in theirs if is_measured(m)}
    result = []
    for measurement in ours:
        repeat = measurement["repeat"]
        if is_measured(measurement) and repeat in their_values:
            result.append(quantity(measurement) / their_values[repeat])
    return result
