"""The numbers of a run, read as a stream: curves of as many points as a page shows, and sums, whatever its length.

A run of a million steps leaves half a gigabyte of lines, of which a page needs some thousand numbers.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from kubetune.config.metric_names import EXPERT_MEASURES, PREFERENCE_MEASURES
from kubetune.reporting.series import Number, Series, Thinner
from kubetune.rundir import metrics

Lines = list[dict[str, Any]]

OF_STEPS = ("loss", "learning_rate", "grad_norm")
OF_TIMINGS = ("tokens_per_second", "trained_tokens_per_second", "peak_memory_bytes")
SKEW = "skew"
_LINES_AT_ONCE = 400


@dataclass(frozen=True)
class RankTimes:
    """Computing times by rank: mean seconds, share of steps in which it was the slowest; and the share of time lost."""

    means: Sequence[float]
    slowest: Sequence[float]
    lost: float


@dataclass(frozen=True)
class Numbers:
    """Curves of metrics.jsonl and timings.jsonl. `curves`: by the name of their key, and `skew`; `axes`: what had been
    reached after some steps, which are the first column: `epoch`, `tokens`, `hours`; `unread`: bytes not read yet."""

    totals: metrics.Totals
    evaluations: Lines
    curves: Mapping[str, Series]
    peak_memory_bytes: int | None
    ranks: RankTimes | None
    axes: Mapping[str, tuple[Sequence[int], Sequence[float]]] = field(default_factory=dict)
    unread: int = 0


def read_numbers(run_dir: Path, points: int, damaged: Mapping[str, list[int]]) -> Numbers:
    """The numbers of a run, curves with at most so many points. `damaged` gets damaged lines' numbers, by file."""
    known = _Known(points)
    for chunk in metrics.stream_chunks(run_dir / metrics.METRICS, damaged[metrics.METRICS]):
        known.add_metrics(chunk)
    for chunk in metrics.stream_chunks(run_dir / metrics.TIMINGS, damaged[metrics.TIMINGS]):
        known.add_timings(chunk)
    return known.numbers()


class NumbersReader:
    """The numbers of a run that goes on, or is long: each look reads what is new, and may end before it has all."""

    def __init__(self, run_dir: Path, points: int) -> None:
        self._followers = [
            metrics.follower(run_dir / name) for name in (metrics.METRICS, metrics.TIMINGS)
        ]
        self._points, self._known = points, _Known(points)

    def read(self, seconds: float = math.inf) -> Numbers:
        """The numbers up to now, or those that could be read in so many seconds; `unread` says how much is left."""
        until = time.monotonic() + seconds
        for at, follower in enumerate(self._followers):
            lines = follower.read()
            if follower.has_begun_anew:  # a start of the run has cut it short, or it is another run
                next(lines, None)  # a look that was not begun would leave the file open
                self._begin_anew()
                return self.read(seconds)
            add = (self._known.add_metrics, self._known.add_timings)[at]
            while chunk := list(islice(lines, _LINES_AT_ONCE)):
                add(chunk)
                if time.monotonic() > until:
                    break
        return replace(self._known.numbers(), unread=self.unread)

    @property
    def unread(self) -> int:
        """Bytes that are left to read."""
        return sum(follower.unread for follower in self._followers)

    @property
    def damaged(self) -> dict[str, list[int]]:
        """Numbers of damaged lines, by file."""
        return {follower.path.name: follower.damaged for follower in self._followers}

    def _begin_anew(self) -> None:
        self._followers = [metrics.follower(follower.path) for follower in self._followers]
        self._known = _Known(self._points)


class _Known:
    """Numbers of a run as far as it was read."""

    def __init__(self, points: int) -> None:
        beside = (*PREFERENCE_MEASURES, *EXPERT_MEASURES)
        self._thinners = {key: Thinner(points) for key in (*OF_STEPS, *beside, *OF_TIMINGS, SKEW)}
        self._totals, self._evaluations = metrics.Totals(), Lines()
        self._axes = {
            "epoch": _Milestones(),
            "tokens": _Milestones(),
            "hours": _Milestones(unit=3600),
        }
        self._peak: int | None = None
        self._waits = _Waits()

    def add_metrics(self, chunk: Lines) -> None:
        """Take up lines of metrics.jsonl."""
        self._evaluations += [line for line in chunk if "eval_loss" in line]
        steps = [line for line in chunk if "loss" in line]
        named = {"accuracy": PREFERENCE_MEASURES, "expert_load_max": EXPERT_MEASURES}
        beside = [
            name for first, names in named.items() if steps and first in steps[0] for name in names
        ]
        self._axes["epoch"].extend(steps, "epoch")
        self._axes["tokens"].extend(steps, "tokens", self._totals.tokens)
        self._totals.add(steps)
        _thin(self._thinners, (*OF_STEPS, *beside), steps)

    def add_timings(self, chunk: Lines) -> None:
        """Take up lines of timings.jsonl."""
        self._axes["hours"].extend(chunk, "seconds", self._totals.seconds)
        self._totals.seconds += math.fsum([line["seconds"] for line in chunk])
        steps, columns = _thin(self._thinners, OF_TIMINGS, chunk)
        self._peak = _highest(self._peak, columns["peak_memory_bytes"])
        try:
            rows = [line["rank_seconds"] for line in chunk]
            is_shared = min(map(len, rows), default=0) > 1
        except (KeyError, TypeError):
            is_shared = False
        if not is_shared:  # of a run that had one rank for a while
            shared = [line for line in chunk if len(line.get("rank_seconds") or ()) > 1]
            steps, rows = (
                [line["step"] for line in shared],
                [line["rank_seconds"] for line in shared],
            )
        self._thinners[SKEW].extend(steps, self._waits.add(rows))

    def numbers(self) -> Numbers:
        """All of it, as it is now."""
        totals = replace(
            self._totals, evaluation=self._evaluations[-1] if self._evaluations else None
        )
        curves = {
            key: found
            for key, thinner in self._thinners.items()
            if (found := thinner.series()) is not None
        }
        reached = {
            name: pairs
            for name, milestones in self._axes.items()
            if (pairs := milestones.found()) is not None
        }
        return Numbers(
            totals, list(self._evaluations), curves, self._peak, self._waits.summary(), reached
        )


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
        known = [
            (step, float(f"{value / self._unit:.6g}")) for step, value in pairs if value is not None
        ]
        if len(known) < len(pairs) or not known or known[-1][1] <= 0:
            return None
        return [step for step, _ in known], [value for _, value in known]


def _highest(before: int | None, values: Sequence[int | None]) -> int | None:
    """The highest that is known."""
    try:
        return max(values) if before is None else max(before, *values)  # type: ignore[type-var]
    except (TypeError, ValueError):  # one of them is None, or there is none
        return max((value for value in (before, *values) if value is not None), default=None)


def _thin(
    thinners: Mapping[str, Thinner], keys: Sequence[str], lines: Lines
) -> tuple[list[int], dict[str, list[Any]]]:
    """Steps and columns of lines, which the thinners have taken up."""
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
    return all_steps, columns


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
            self.slowest.setdefault(world, Counter()).update(map(list.index, of_world, highest))
            self.longest[world] += math.fsum(highest)  # type: ignore[assignment]
            self.count[world] += len(of_world)
        self.world = len(rows[-1]) if rows else self.world
        return [
            1 - least / most if most > 0 else None
            for least, most in zip(map(min, rows), longest, strict=True)
        ]

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


__all__ = [
    "OF_STEPS",
    "OF_TIMINGS",
    "SKEW",
    "Number",
    "Numbers",
    "NumbersReader",
    "RankTimes",
    "read_numbers",
]
