"""The numbers of a run, read as a stream into sums, and into curves with as many points as a page shows.

A run of a million steps writes half a gigabyte of lines. A page needs some thousand numbers of them.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from kubetune.config.metric_names import (
    DISTILL_MEASURES,
    DRAWN_MEASURES,
    EXPERT_MEASURES,
    GRPO_MEASURES,
    PREFERENCE_MEASURES,
    SECONDS_OF_PARTS,
)
from kubetune.reporting.series import Number, Series, Thinner
from kubetune.rundir import metrics
from kubetune.rundir.totals import Totals

Lines = list[dict[str, Any]]

# Keys of lines of metrics.jsonl and of timings.jsonl that become curves.
OF_STEPS = ("loss", "learning_rate", "grad_norm")
OF_TIMINGS = ("tokens_per_second", "peak_memory_bytes", *SECONDS_OF_PARTS)

# Before the name of a reward function: the means of each function are a curve.
OF_REWARD = "reward/"

# More reward functions than a chart can show; a line of a received run may have any keys.
MOST_REWARDS = 20

# The curve of how unequal the ranks were. It is no key of a line, but computed from `rank_seconds`.
SKEW = "skew"

# Lines between two looks at the clock.
_LINES_AT_ONCE = 400


@dataclass(frozen=True)
class RankTimes:
    """How long the ranks computed."""

    means: Sequence[float]  # mean seconds of each rank
    slowest: Sequence[float]  # of each rank, the share of the steps in which it was the slowest
    lost: float  # share of the time that ranks waited for the slowest one


@dataclass(frozen=True)
class RunNumbers:
    """Curves and sums of metrics.jsonl and timings.jsonl."""

    totals: Totals
    evaluations: Lines
    curves: Mapping[str, Series]  # by the name of their key, and `skew`
    peak_memory_bytes: int | None
    ranks: RankTimes | None
    # For `epoch`, `tokens` and `hours`: some steps, and what had been reached after each.
    axes: Mapping[str, tuple[Sequence[int], Sequence[float]]] = field(default_factory=dict)
    unread: int = 0  # bytes that are not read yet


def read_numbers(
    run_dir: Path,
    points: int,
    damaged: Mapping[str, list[int]],
) -> RunNumbers:
    """Return the numbers of a run, with at most `points` points a curve.

    The line numbers of damaged lines are added to `damaged`, by file.
    """
    # Chunk by chunk, so that a long file is never in memory.
    collected = _Collected(points)
    for chunk in metrics.stream_chunks(run_dir / metrics.METRICS, damaged[metrics.METRICS]):
        collected.add_metrics(chunk)
    for chunk in metrics.stream_chunks(run_dir / metrics.TIMINGS, damaged[metrics.TIMINGS]):
        collected.add_timings(chunk)
    return collected.numbers()


class NumbersReader:
    """The numbers of a run that is still running, or is long.

    Each look reads only what is new, and may end before it has read everything.
    """

    def __init__(self, run_dir: Path, points: int) -> None:
        self._points = points
        self._metrics = metrics.follower(run_dir / metrics.METRICS)
        self._timings = metrics.follower(run_dir / metrics.TIMINGS)
        self._collected = _Collected(points)

    def read(self, seconds: float = math.inf) -> RunNumbers:
        """Return the numbers up to now, or what can be read in so many seconds."""
        until = time.monotonic() + seconds
        for follower in (self._metrics, self._timings):
            lines = follower.read()
            # The file is another run's, or a new start of the run has cut it short.
            if follower.has_begun_anew:
                next(lines, None)  # opens and closes the file; else it would stay open
                self._begin_anew()
                return self.read(seconds)
            # At least one chunk a look, so that a slow disk holds nothing up forever.
            while chunk := list(islice(lines, _LINES_AT_ONCE)):
                if follower is self._metrics:
                    self._collected.add_metrics(chunk)
                else:
                    self._collected.add_timings(chunk)
                if time.monotonic() > until:
                    break

        return replace(self._collected.numbers(), unread=self.unread)

    @property
    def unread(self) -> int:
        """Bytes that are not read yet."""
        return self._metrics.unread + self._timings.unread

    @property
    def damaged(self) -> dict[str, list[int]]:
        """Numbers of damaged lines, by file."""
        followers = (self._metrics, self._timings)
        return {follower.path.name: follower.damaged for follower in followers}

    def _begin_anew(self) -> None:
        """Forget what was read, and read both files from their start."""
        self._metrics = metrics.follower(self._metrics.path)
        self._timings = metrics.follower(self._timings.path)
        self._collected = _Collected(self._points)


class _Collected:
    """The numbers of a run as far as it was read."""

    def __init__(self, points: int) -> None:
        of_tasks = (
            *PREFERENCE_MEASURES,
            *GRPO_MEASURES,
            *DISTILL_MEASURES,
            *DRAWN_MEASURES,
            *EXPERT_MEASURES,
        )
        keys = (*OF_STEPS, *of_tasks, *OF_TIMINGS, SKEW)
        self._points = points
        self._thinners = {key: Thinner(points) for key in keys}
        self._totals = Totals()
        self._evaluations = Lines()
        self._axes = {
            "epoch": _Milestones(),
            "tokens": _Milestones(),
            "hours": _Milestones(unit=3600),
        }
        self._peak = 0  # bytes, 0 if unknown
        self._waits = _Waits()

    def add_metrics(self, chunk: Lines) -> None:
        """Add lines of metrics.jsonl."""
        steps = []
        for line in chunk:
            if metrics.is_evaluation(line):
                self._evaluations.append(line)
            if "loss" in line:
                steps.append(line)

        if not steps:
            return

        # Either all lines of steps have the measures of a task, or none has.
        keys = [*OF_STEPS]
        if "accuracy" in steps[0]:
            keys += PREFERENCE_MEASURES
        if "reward" in steps[0]:
            keys += (*GRPO_MEASURES, *DRAWN_MEASURES, *_reward_keys(steps))
        if "divergence" in steps[0]:
            keys += DISTILL_MEASURES
        if "expert_load_max" in steps[0]:
            keys += EXPERT_MEASURES

        # Tokens add up from the end of the lines before, so the axis comes before the totals.
        self._axes["epoch"].extend(steps, "epoch")
        self._axes["tokens"].extend(steps, "tokens", self._totals.tokens)
        self._totals.add(steps)
        self._thin(keys, steps)

    def add_timings(self, chunk: Lines) -> None:
        """Add lines of timings.jsonl."""
        self._axes["hours"].extend(chunk, "seconds", self._totals.seconds)
        self._totals.seconds += math.fsum([line["seconds"] for line in chunk])
        self._thin(OF_TIMINGS, chunk)
        for line in chunk:
            self._peak = max(self._peak, line.get("peak_memory_bytes") or 0)

        # A lone rank waits for nobody. A run may have had one rank for a while.
        steps = []
        rank_seconds: list[list[float]] = []
        for line in chunk:
            seconds = line.get("rank_seconds")
            if seconds and len(seconds) > 1:
                steps.append(line["step"])
                rank_seconds.append(seconds)

        self._thinners[SKEW].extend(steps, self._waits.add(rank_seconds))

    def _thin(self, keys: Sequence[str], lines: Lines) -> None:
        """Add the values of these keys to their curves. Lines may lack a key."""
        all_steps = [line["step"] for line in lines]
        for key in keys:
            # Nearly always all lines have the key, so that the list of steps is made once.
            having = [line for line in lines if key in line]
            steps = all_steps
            if len(having) < len(lines):
                steps = [line["step"] for line in having]
            if key not in self._thinners:
                self._thinners[key] = Thinner(self._points)
            self._thinners[key].extend(steps, [line[key] for line in having])

    def numbers(self) -> RunNumbers:
        """Return everything as it is now."""
        last = self._evaluations[-1] if self._evaluations else None
        curves = {}
        for key, thinner in self._thinners.items():
            series = thinner.series()
            if series is not None:
                curves[key] = series

        axes = {}
        for name, milestones in self._axes.items():
            reached = milestones.reached()
            if reached is not None:
                axes[name] = reached

        return RunNumbers(
            totals=replace(self._totals, evaluation=last),
            evaluations=list(self._evaluations),
            curves=curves,
            peak_memory_bytes=self._peak or None,
            ranks=self._waits.summary(),
            axes=axes,
        )


def _reward_keys(steps: Lines) -> list[str]:
    """Return the keys of reward functions. A step in which one could judge nothing lacks its key."""
    keys: dict[str, None] = {}  # an ordered set
    for line in steps:
        for key in line:
            if key.startswith(OF_REWARD):
                keys[key] = None
    return list(keys)[:MOST_REWARDS]


# More of them are thinned out. A chart draws straight lines between them.
_MILESTONES = 256


class _Milestones:
    """The progress of a run after some of its steps, evenly spread, and after the last one.

    A chart uses these if its axis is not the steps.
    """

    def __init__(self, unit: float = 1) -> None:
        self._unit = unit
        self._stride = 1  # every so many lines become a milestone
        self._lines = 0
        self._milestones: list[tuple[int, float | None]] = []
        self._last: tuple[int, float | None] | None = None

    def extend(
        self,
        lines: Lines,
        key: str,
        total: float | None = None,
    ) -> None:
        """Add lines. With `total`, their values of `key` are added up on top of it."""

        def value_after(index: int) -> float | None:
            if total is None:
                value: float | None = lines[index].get(key)
                return value
            return total + math.fsum([line.get(key) or 0 for line in lines[: index + 1]])

        # The first line here with a number in the file that is a multiple of the stride.
        #     5 lines before, stride 4: numbers 5 6 7 8 → index 3
        first = -self._lines % self._stride
        for index in range(first, len(lines), self._stride):
            self._milestones.append((lines[index]["step"], value_after(index)))
        self._lines += len(lines)
        if lines:
            self._last = (lines[-1]["step"], value_after(len(lines) - 1))

        while len(self._milestones) > _MILESTONES:
            # Every second one stays, and from now on every second one is taken.
            self._milestones = self._milestones[::2]
            self._stride *= 2

    def reached(self) -> tuple[Sequence[int], Sequence[float]] | None:
        """Return steps and values, or None if some value is missing or the values do not grow."""

        # The last step ends the axis, whether it is a milestone or not.
        milestones = list(self._milestones)
        if self._last is not None and self._last not in milestones:
            milestones.append(self._last)
        steps = []
        values = []
        for step, value in milestones:
            if value is None:
                return None
            steps.append(step)
            values.append(float(f"{value / self._unit:.6g}"))

        if not values or values[-1] <= 0:
            return None
        return steps, values


@dataclass
class _WaitsOfWorld:
    """Sums over the steps that a run took with one number of ranks."""

    seconds: list[float]  # that each rank computed
    slowest: Counter[int] = field(default_factory=Counter)  # how often each rank was the slowest
    longest: float = 0.0  # seconds of the slowest rank of each step
    steps: int = 0


class _Waits:
    """Sums over how long the ranks computed, apart for each number of ranks that the run had."""

    def __init__(self) -> None:
        self._by_world: dict[int, _WaitsOfWorld] = {}
        self._world = 0  # the number of ranks in the last step

    def add(self, rows: Sequence[list[float]]) -> list[float | None]:
        """Add the seconds of all ranks, a row a step.

        Return for each step how much shorter the fastest rank computed than the slowest, as a share.

            [2.0, 4.0, 3.0] → 0.5
        """
        by_world: dict[int, list[list[float]]] = {}
        skews: list[float | None] = []
        for row in rows:
            by_world.setdefault(len(row), []).append(row)
            longest = max(row)
            if longest > 0:
                skews.append(1 - min(row) / longest)
            else:
                skews.append(None)
            self._world = len(row)

        # Sums of whole columns are much faster than of one row after the other.
        for world, rows_of_world in by_world.items():
            sums = self._by_world.setdefault(world, _WaitsOfWorld([0.0] * world))
            for rank, seconds in enumerate(zip(*rows_of_world, strict=True)):
                sums.seconds[rank] += math.fsum(seconds)
            longest_of_steps = [max(row) for row in rows_of_world]
            sums.slowest.update(map(list.index, rows_of_world, longest_of_steps))
            sums.longest += math.fsum(longest_of_steps)
            sums.steps += len(rows_of_world)

        return skews

    def summary(self) -> RankTimes | None:
        """Return the sums for the number of ranks that the run had last, or None if it had one."""
        sums = self._by_world.get(self._world)
        if sums is None:
            return None

        # With ranks of 3 and 5 s, of 5 s each rank waits 1 s on average: a fifth is lost.
        mean_of_ranks = math.fsum(sums.seconds) / self._world
        return RankTimes(
            means=[total / sums.steps for total in sums.seconds],
            slowest=[sums.slowest[rank] / sums.steps for rank in range(self._world)],
            lost=(sums.longest - mean_of_ranks) / max(sums.longest, 1e-12),
        )


__all__ = [
    "OF_STEPS",
    "OF_TIMINGS",
    "SKEW",
    "Number",
    "NumbersReader",
    "RankTimes",
    "RunNumbers",
    "read_numbers",
]
