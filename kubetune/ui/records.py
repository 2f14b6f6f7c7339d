"""Runs below one folder, read for pages, and kept as long as their files stay as they are.

Paths come from a browser: what lies outside the folder is as if it were not there, links that lead out included.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kubetune.base import jsonl
from kubetune.config.naming import RESOLVED
from kubetune.library.listing import facts, find_runs
from kubetune.reporting.numbers import NumbersReader
from kubetune.reporting.reading import RunRecord, read_run
from kubetune.reporting.run_charts import points_of
from kubetune.rundir import exit_status, heartbeat, metrics
from kubetune.rundir.status import ranks, state_of

Signature = tuple[tuple[int, int, int], ...]

_FILES = (
    RESOLVED, metrics.METRICS, metrics.TIMINGS, metrics.EVENTS, metrics.LOAD, metrics.VERDICT, metrics.EVALUATION,
    metrics.REPORT, metrics.PLAN, exit_status.EXIT, "checkpoints", metrics.ANSWERS, metrics.BEFORE_AFTER,
    metrics.BENCHMARKS, metrics.DATA, heartbeat.HANG,
)  # fmt: skip
_MOST_KEPT = 24
_SPARK_POINTS, _SPARK_WIDTH, _SPARK_HEIGHT = 40, 120, 28
_PAGE_SECONDS, _NEWS_SECONDS = 0.05, 0.5
"""For which a page, and the news of one that is open, read the numbers of a long run."""


class Records:
    """The runs at or below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._real = folder.resolve()
        self._facts: dict[Path, tuple[Signature, dict[str, Any]]] = {}
        self._kept: OrderedDict[tuple[Path, int], _Kept] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, name: str) -> Path | None:
        """The run directory of a path relative to the folder; None where there is none inside it."""
        place = Path(os.path.normpath(self.folder / name))
        try:
            real = place.resolve()
        except ValueError:  # no file can have such a name
            return None
        is_inside = real == self._real or self._real in real.parents
        return place if is_inside and (real / RESOLVED).is_file() else None

    def name_of(self, run_dir: Path) -> str:
        """The path of a run relative to the folder, as pages name it."""
        return os.path.relpath(run_dir, self.folder)

    def listed(self) -> list[dict[str, Any]]:
        """The facts of all runs, with `dir`, what pages call them, and `spark`, their loss in a small line."""
        found = []
        for run_dir in find_runs(self.folder):
            now = signature(run_dir)
            known = self._facts.get(run_dir)
            if known is None or known[0] != now:
                known = (
                    now,
                    {**facts(run_dir), "dir": self.name_of(run_dir), "spark": spark(run_dir)},
                )
                self._facts[run_dir] = known
            one = known[1]
            if one["state"] in ("running", "waiting"):  # which its beats tell, and they only
                state, why = state_of(None, ranks(run_dir))
                one = {**one, "state": state, "why": why}
            found.append(one)
        return found

    def read(self, run_dirs: Sequence[Path]) -> list[RunRecord]:
        """The records of runs that are shown on one page, of long ones as far as they are read yet.

        Raises what `read_run` does.
        """
        points = points_of(len(run_dirs))
        return [self._read(run_dir, points, _PAGE_SECONDS / len(run_dirs)) for run_dir in run_dirs]

    def read_on(self, run_dirs: Sequence[Path]) -> int:
        """Bytes of the runs' numbers that are still unread, after a moment of reading more of them."""
        points = points_of(len(run_dirs))
        known = [
            kept for run_dir in run_dirs if (kept := self._kept.get((run_dir, points))) is not None
        ]
        left = 0
        for kept in known:
            if kept.record is not None and kept.record.numbers.unread:
                with kept.lock:
                    kept.reader.read(_NEWS_SECONDS / len(known))
                    left += 1 + kept.reader.unread
        return left

    def _read(self, run_dir: Path, points: int, seconds: float) -> RunRecord:
        with self._lock:
            kept = self._kept.setdefault((run_dir, points), _Kept(NumbersReader(run_dir, points)))
            self._kept.move_to_end((run_dir, points))
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        with kept.lock:
            now = signature(run_dir)
            if kept.record is None or kept.signature != now or kept.record.numbers.unread:
                kept.record, kept.signature = read_run(run_dir, points, kept.reader, seconds), now
            return kept.record


@dataclass
class _Kept:
    """A run as it was last read, and the reader that goes on from there."""

    reader: NumbersReader
    record: RunRecord | None = None
    signature: Signature = ()
    lock: threading.Lock = field(default_factory=threading.Lock)


def spark(run_dir: Path) -> str:
    """Points of the training loss from the first step to the last, for a line as small as a word; may be empty."""
    lines = jsonl.sample(run_dir / metrics.METRICS, _SPARK_POINTS)
    known = [line["loss"] for line in lines if isinstance(line.get("loss"), (int, float))]
    if len(known) < 2:
        return ""
    low, high = min(known), max(known)
    across, down = _SPARK_WIDTH / (len(known) - 1), (_SPARK_HEIGHT - 4) / ((high - low) or 1)
    return " ".join(
        f"{i * across:.1f},{2 + (high - value) * down:.1f}" for i, value in enumerate(known)
    )


def signature(run_dir: Path) -> Signature:
    """Inode, size and time of the files that pages are made of; another one as soon as any of them changes."""
    found = []
    for name in _FILES:
        try:
            known = os.stat(run_dir / name)
            found.append((known.st_ino, known.st_size, known.st_mtime_ns))
        except OSError:
            found.append((0, 0, 0))
    return tuple(found)
