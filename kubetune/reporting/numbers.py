"""The numbers of a run, read as a stream: curves of as many points as a page shows, and sums, whatever its length.

A run of a million steps leaves half a gigabyte of lines, of which a page needs some thousand numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kubetune.config.metric_names import PREFERENCE_MEASURES
from kubetune.reporting.series import Number, Series, Thinner
from kubetune.rundir import metrics

Lines = list[dict[str, Any]]

OF_STEPS = ("loss", "learning_rate", "grad_norm")
OF_TIMINGS = ("tokens_per_second", "trained_tokens_per_second", "peak_memory_bytes")
SKEW = "skew"


@dataclass(frozen=True)
class RankTimes:
    """Computing times by rank: mean seconds, share of steps in which it was the slowest; and the share of time lost."""

    means: Sequence[float]
    slowest: Sequence[float]
    lost: float


@dataclass(frozen=True)
class Numbers:
    """Curves of metrics.jsonl and timings.jsonl. `curves`: by the name of their key, and `skew`; `axes`: what had been
    reached after some steps, which are the first column: `epoch`, `tokens`, `hours`."""

    totals: metrics.Totals
    evaluations: Lines
    curves: Mapping[str, Series]
    peak_memory_bytes: int | None
    ranks: RankTimes | None
    axes: Mapping[str, tuple[Sequence[int], Sequence[float]]] = field(default_factory=dict)


def read_numbers(run_dir: Path, points: int, damaged: Mapping[str, list[int]]) -> Numbers:
    """The numbers of a run, curves with at most so many points. `damaged` gets damaged lines' numbers, by file."""
    thinners = {key: Thinner(points) for key in (*OF_STEPS, *PREFERENCE_MEASURES, *OF_TIMINGS, SKEW)}
    totals, evaluations = metrics.Totals(), Lines()
    axes = {"epoch": _Milestones(), "tokens": _Milestones(), "hours": _Milestones(unit=3600)}
    for chunk in metrics.stream_chunks(run_dir / metrics.METRICS, damaged[metrics.METRICS]):
        evaluations += [line for line in chunk if "eval_loss" in line]
        steps = [line for line in chunk if "loss" in line]
        compared = PREFERENCE_MEASURES if steps and "accuracy" in steps[0] else ()
        axes["epoch"].extend(steps, "epoch")
        axes["tokens"].extend(steps, "tokens", totals.tokens)
        totals.add(steps)
        _thin(thinners, (*OF_STEPS, *compared), steps)
    totals.evaluation = evaluations[-1] if evaluations else None
    peak, waits = None, _Waits()
    for chunk in metrics.stream_chunks(run_dir / metrics.TIMINGS, damaged[metrics.TIMINGS]):
        axes["hours"].extend(chunk, "seconds", totals.seconds)
        totals.seconds += math.fsum([line["seconds"] for line in chunk])
        columns = _thin(thinners, OF_TIMINGS, chunk)
        peak = max([value for value in (peak, *columns["peak_memory_bytes"]) if value is not None], default=None)
        shared = _shared(chunk)
        thinners[SKEW].extend([line["step"] for line in shared], waits.add([line["rank_seconds"] for line in shared]))
    curves = {key: found for key, thinner in thinners.items() if (found := thinner.series()) is not None}
    reached = {name: pairs for name, milestones in axes.items() if (pairs := milestones.found()) is not None}
    return Numbers(totals, evaluations, curves, peak, waits.summary(), reached)


_MILESTONES = 256


class _Milestones:
    """Totals of a run after some of its steps, evenly spread, and after the last; for axes other than steps."""

    def __init__(self, unit: float = 1) -> None:
        self._unit, self._every, self._seen = unit, 1, 0
        self._kept: list[tuple[int, float | None]] = []
        self._last: tuple[int, Callable[[], float | None]] | None = None

    def extend(self, lines: Lines, key: str, total: float | None = None) -> None:
        """Take up the lines of a chunk with their values of a key, or with the sums of these on top of `total`."""

        def reached(at: int) -> float | None:
            if total is None:
                value: float | None = lines[at].get(key)
                return value
            return total + math.fsum([line.get(key) or 0 for line in lines[: at + 1]])

        for at in range(-self._seen % self._every, len(lines), self._every):
            self._kept.append((lines[at]["step"], reached(at)))
        self._seen += len(lines)
        if lines:
            self._last = lines[-1]["step"], partial(reached, len(lines) - 1)
        while len(self._kept) > _MILESTONES:
            self._kept = self._kept[::2]
            self._every *= 2

    def found(self) -> tuple[Sequence[int], Sequence[float]] | None:
        """Steps and values; None where the run does not say, or nothing grows."""
        last = [(self._last[0], self._last[1]())] if self._last is not None else []
        pairs = [*self._kept, *(pair for pair in last if pair not in self._kept)]
        known = [(step, float(f"{value / self._unit:.6g}")) for step, value in pairs if value is not None]
        if len(known) < len(pairs) or not known or known[-1][1] <= 0:
            return None
        return [step for step, _ in known], [value for _, value in known]


def _shared(lines: Lines) -> Lines:
    """Lines of steps that several ranks computed: mostly all of them."""
    try:
        if min([len(line["rank_seconds"]) for line in lines], default=0) > 1:
            return lines
    except (KeyError, TypeError):  # of a run that had one rank for a while
        pass
    return [line for line in lines if len(line.get("rank_seconds") or ()) > 1]


def _thin(thinners: Mapping[str, Thinner], keys: Sequence[str], lines: Lines) -> dict[str, list[Any]]:
    """Columns of lines, which the thinners have taken up."""
    columns: dict[str, list[Any]] = {}
    all_steps = [line["step"] for line in lines]
    for key in keys:
        steps = all_steps
        try:
            columns[key] = [line[key] for line in lines]
        except KeyError:  # not every line has it
            steps = [line["step"] for line in lines if key in line]
            columns[key] = [line[key] for line in lines if key in line]
        thinners[key].extend(steps, columns[key])
    return columns


@dataclass
class _Waits:
    """Sums over what each rank computed, apart for each number of ranks that the run had."""

    seconds: dict[int, list[float]] = field(default_factory=dict)
    slowest: dict[int, Counter[int]] = field(default_factory=dict)
    longest: Counter[int] = field(default_factory=Counter)
    count: Counter[int] = field(default_factory=Counter)
    world: int = 0

    def add(self, rows: Sequence[list[float]]) -> list[float | None]:
        """Count these, and return how much shorter the fastest rank of each computed than its slowest, as a share."""
        longest = list(map(max, rows))
        worlds = set(map(len, rows))
        for world in worlds:
            of_world = rows if len(worlds) == 1 else [row for row in rows if len(row) == world]
            highest = longest if len(worlds) == 1 else list(map(max, of_world))
            sums = map(math.fsum, zip(*of_world, strict=True))
            before = self.seconds.get(world, [0.0] * world)
            self.seconds[world] = [one + two for one, two in zip(before, sums, strict=True)]
            found = Counter(map(list.index, of_world, highest))
            self.slowest[world] = self.slowest.get(world, Counter()) + found
            self.longest[world] += math.fsum(highest)  # type: ignore[assignment]
            self.count[world] += len(of_world)
        self.world = len(rows[-1]) if rows else self.world
        return [1 - least / most if most > 0 else None for least, most in zip(map(min, rows), longest, strict=True)]

    def summary(self) -> RankTimes | None:
        """Of the number of ranks that the run had last."""
        if not self.world:
            return None
        count, seconds = self.count[self.world], self.seconds[self.world]
        longest = self.longest[self.world]
        return RankTimes(
            means=[total / count for total in seconds],
            slowest=[self.slowest[self.world][rank] / count for rank in range(self.world)],
            lost=(longest - math.fsum(seconds) / self.world) / max(longest, 1e-12),
        )


__all__ = ["OF_STEPS", "OF_TIMINGS", "SKEW", "Number", "Numbers", "RankTimes", "read_numbers"]
