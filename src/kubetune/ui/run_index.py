"""Runs below one folder, read for pages, and kept until their files change.

Paths come from a browser: what is outside the folder does not exist for it, also behind a link.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kubetune.base import jsonl
from kubetune.config.metric_names import main_metric
from kubetune.config.naming import RESOLVED
from kubetune.config.resolved import read_config
from kubetune.data.findings import kept_conversations
from kubetune.errors import EnvironmentFault
from kubetune.library.listing import facts, find_runs
from kubetune.library.sweep.sweep_list import find_sweeps, overview
from kubetune.library.sweep.sweep_record import SWEEP, TRIAL_RUNS
from kubetune.reporting.histogram import drawn_bars
from kubetune.reporting.numbers import NumbersReader
from kubetune.reporting.reading import RunRecord, read_run
from kubetune.reporting.run_charts import points_of
from kubetune.rundir import exit_status, heartbeat, metrics, shapes
from kubetune.rundir.labels import LABELS
from kubetune.rundir.status import LIVE, ranks, state_of

# Inode, size and time of each of _FILES; zeros for a file that is missing.
Signature = tuple[tuple[int, int, int], ...]

# The files of a run that pages are made of.
_FILES = (
    RESOLVED, metrics.METRICS, metrics.TIMINGS, metrics.EVENTS, metrics.LOAD, metrics.VERDICT, metrics.EVALUATION,
    metrics.BASE, metrics.REPORT, metrics.PLAN, exit_status.EXIT, "checkpoints", metrics.ANSWERS, metrics.BEFORE_AFTER,
    metrics.BENCHMARKS, metrics.DATA, heartbeat.HANG, LABELS,
)  # fmt: skip
_MOST_KEPT = 24  # records in memory

# The small curve of the list: steps with values, at most so many, and its size in pixels.
Point = tuple[float, float]
_SPARK_POINTS = 40
_SPARK_WIDTH = 120
_SPARK_HEIGHT = 28

# How long a page, and the news of an open page, read the numbers of a long run.
_PAGE_SECONDS = 0.05
_NEWS_SECONDS = 0.5


class Records:
    """The runs at or below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._real = folder.resolve()
        self._facts: dict[Path, tuple[Signature, dict[str, Any]]] = {}
        self._data: dict[Path, tuple[Signature, dict[str, Any]]] = {}
        self._kept: OrderedDict[tuple[Path, int], _Kept] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, name: str, mark: str = RESOLVED) -> Path | None:
        """Return the run directory of a path relative to the folder, or None if it is not inside.

        `mark`: the file that such a directory holds; with SWEEP, the folder of a sweep is returned.
        """
        # `..` is taken out by the text first: on the disk a link may lead elsewhere.
        place = Path(os.path.normpath(self.folder / name))
        try:
            real = place.resolve()
        except ValueError:  # no file can have such a name
            return None
        # The real path decides, since a link in the folder may lead out of it.
        is_inside = real == self._real or self._real in real.parents
        if not is_inside or not (real / mark).is_file():
            return None
        return place

    def name_of(self, run_dir: Path) -> str:
        """Return the path of a run or a sweep relative to the folder, which is its name on pages."""
        return os.path.relpath(run_dir, self.folder)

    def listed(self) -> list[dict[str, Any]]:
        """Return the facts of all runs.

        With `dir`, the name, `main`, the metric that the run is about, `spark`, a small curve of the loss, and
        `measured`, its evaluations, of which others are drawn.
        """
        runs = []
        for run_dir in find_runs(self.folder):
            now = signature(run_dir)
            # A folder may hold thousands of runs, of which few change between two looks.
            before, run = self._facts.get(run_dir, ((), {}))
            if before != now:
                of_run = facts(run_dir)
                run = {
                    **of_run,
                    "main": main_metric(
                        of_run["evaluation"] or {}, of_run["metric"], of_run["task"]
                    ),
                    "dir": self.name_of(run_dir),
                    "spark": spark(_losses(run_dir)),
                    "measured": _measured(run_dir, of_run["before"] or {}),
                }
                self._facts[run_dir] = (now, run)

            if run["state"] in LIVE:
                # Only heartbeats decide between these, and they are not part of the signature.
                state, why = state_of(None, ranks(run_dir), run["launched"])
                run = {**run, "state": state, "why": why}
            runs.append(run)

        return runs

    def data_of(self, run_dir: Path) -> dict[str, Any]:
        """Return the data set of a run: a key that runs of the same rows share, its sources, and counts of its rows.

        Counts are None before the rows are prepared. Raise what `read_config` raises.
        """
        now = signature(run_dir)
        before, known = self._data.get(run_dir, ((), {}))
        if before == now:
            return known
        config = read_config(run_dir)
        prepared: dict[str, Any] = {}
        with suppress(FileNotFoundError, EnvironmentFault):
            prepared = shapes.read(run_dir / metrics.DATA)
        splits = prepared.get("splits") or {}
        train = splits.get("train") or {}
        paths = sorted(source.path for source in config.data.train)
        made: dict[str, Any] = {
            "key": str(prepared.get("fingerprint") or paths),
            "paths": paths,
            "names": [Path(path).name for path in paths],
            "task": config.task,
            # A row of a pair is longer than the longest of its two sequences.
            "is_paired": config.record_kind in ("pair", "graded"),
            "rewards": str(config.rewards),
            "rows": train.get("rows"),
            "held_out": (splits.get("eval") or {}).get("rows"),
            "tokens": train.get("tokens"),
            "longest": train.get("longest"),
            "bars": drawn_bars(train.get("lengths") or []),
            "example": _example(run_dir),
        }
        self._data[run_dir] = (now, made)
        return made

    def sweeps(self) -> list[dict[str, Any]]:
        """Return the facts of all sweeps, with `dir`, the name."""
        return [
            {**overview(place), "dir": self.name_of(place)} for place in find_sweeps(self.folder)
        ]

    def sweep_of(self, run_dir: Path) -> str | None:
        """Return the name of the sweep that a run is a trial of, or None."""
        place = run_dir.parent.parent
        if run_dir.parent.name != TRIAL_RUNS or self.find(self.name_of(place), SWEEP) is None:
            return None
        return self.name_of(place)

    def forget(self, run_dir: Path) -> None:
        """Forget a run that is deleted."""
        self._facts.pop(run_dir, None)
        self._data.pop(run_dir, None)
        with self._lock:
            for key in [key for key in self._kept if key[0] == run_dir]:
                del self._kept[key]

    def read(self, run_dirs: Sequence[Path]) -> list[RunRecord]:
        """Return the records of the runs of one page; of long runs, as far as they are read yet.

        Raise what `read_run` raises.
        """
        points = points_of(len(run_dirs))
        seconds = _PAGE_SECONDS / len(run_dirs)
        return [self._read(run_dir, points, seconds) for run_dir in run_dirs]

    def read_on(self, run_dirs: Sequence[Path]) -> int:
        """Read more of the runs' numbers for a moment. Return 0 if nothing was left to read.

        Otherwise, return a number that changes with every call.
        """
        # A page reads a run with as many points as the number of its runs allows.
        points = points_of(len(run_dirs))
        shown = []
        for run_dir in run_dirs:
            kept = self._kept.get((run_dir, points))
            if kept is not None:
                shown.append(kept)

        unread = 0
        for kept in shown:
            if kept.record is not None and kept.record.numbers.unread:
                with kept.lock:
                    kept.reader.read(_NEWS_SECONDS / len(shown))
                    unread += 1 + kept.reader.unread

        return unread

    def _read(
        self,
        run_dir: Path,
        points: int,
        seconds: float,
    ) -> RunRecord:
        """Return the record of a run, read again if its files have changed."""
        # The lock of all is held only to find the run, so that one long run blocks no other page.
        with self._lock:
            kept = self._kept.setdefault((run_dir, points), _Kept(NumbersReader(run_dir, points)))
            self._kept.move_to_end((run_dir, points))
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)

        with kept.lock:
            now = signature(run_dir)
            # Reading continues where the last page stopped.
            if kept.record is None or kept.signature != now or kept.record.numbers.unread:
                kept.record = read_run(run_dir, points, kept.reader, seconds)
                kept.signature = now
            return kept.record


@dataclass
class _Kept:
    """A run as it was last read, and the reader that continues from there."""

    reader: NumbersReader
    record: RunRecord | None = None
    signature: Signature = ()
    lock: threading.Lock = field(default_factory=threading.Lock)


def _example(run_dir: Path) -> str:
    """Return what is asked in one of the conversations that a run keeps of its data; "" without any."""
    with suppress(EnvironmentFault):
        for kept in kept_conversations.read(run_dir):
            content = kept.messages[-1].get("content") if kept.messages else None
            if isinstance(content, str):
                return content
    return ""


def _losses(run_dir: Path) -> list[Point]:
    """Return some training losses of a run, from the first to the last."""
    # A sample of the file: a small curve needs no more.
    lines = jsonl.sample(run_dir / metrics.METRICS, _SPARK_POINTS)
    return by_step(lines, "loss")


def _measured(run_dir: Path, before: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return some evaluations of a run, the last among them, and before them what it was before training."""
    newest_first = list(metrics.evaluations(run_dir))
    every = max(1, -(-len(newest_first) // _SPARK_POINTS))  # rounded up
    some = newest_first[::every]
    return [{**before, "step": 0}, *reversed(some)]


def by_step(lines: Iterable[Mapping[str, Any]], name: str) -> list[Point]:
    """Return step and value of the lines that have a number of this name."""
    points = []
    for line in lines:
        value: Any = line.get(name)
        if metrics.is_number(value) and metrics.is_number(line.get("step")):
            points.append((line["step"], value))
    return points


def spark(points: Sequence[Point]) -> str:
    """Return steps and values as points of a polyline that is as small as a word; "" for fewer than two."""
    if len(points) < 2:
        return ""

    # Two pixels above and below stay free for the width of the line.
    values = [value for _, value in points]
    low = min(values)
    high = max(values)
    first, last = points[0][0], points[-1][0]
    x_scale = _SPARK_WIDTH / ((last - first) or 1)
    y_scale = (_SPARK_HEIGHT - 4) / ((high - low) or 1)
    drawn = []
    for step, value in points:
        drawn.append(f"{(step - first) * x_scale:.1f},{2 + (high - value) * y_scale:.1f}")
    return " ".join(drawn)


def signature(run_dir: Path) -> Signature:
    """Return inode, size and time of the files that pages are made of. It changes when a file does."""
    files = []
    for name in _FILES:
        try:
            facts_of_file = os.stat(run_dir / name)
        except OSError:
            files.append((0, 0, 0))
            continue
        files.append((facts_of_file.st_ino, facts_of_file.st_size, facts_of_file.st_mtime_ns))
    return tuple(files)
