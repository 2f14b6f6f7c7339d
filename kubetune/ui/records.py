"""Runs below one folder, read for pages, and kept as long as their files stay as they are.

Paths come from a browser: what lies outside the folder is as if it were not there, links that lead out included.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kubetune.config.naming import RESOLVED
from kubetune.library.listing import facts, find_runs
from kubetune.reporting.charts import points_of
from kubetune.reporting.reading import RunRecord, read_run
from kubetune.rundir import heartbeat, metrics

Signature = tuple[tuple[int, int, int], ...]

_FILES = (
    RESOLVED, metrics.METRICS, metrics.TIMINGS, metrics.EVENTS, metrics.LOAD, metrics.VERDICT, metrics.EVALUATION,
    metrics.REPORT, metrics.PLAN, "exit.json", "checkpoints", "answers", heartbeat.HANG,
)  # fmt: skip
_KEPT = 24


class Records:
    """The runs at or below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._real = folder.resolve()
        self._facts: dict[Path, tuple[Signature, dict[str, Any]]] = {}
        self._records: OrderedDict[tuple[Path, int], tuple[Signature, RunRecord]] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, name: str) -> Path | None:
        """The run directory of a path relative to the folder; None where there is none inside it."""
        if "\0" in name:
            return None
        place = Path(os.path.normpath(self.folder / name))
        real = place.resolve()
        is_inside = real == self._real or self._real in real.parents
        return place if is_inside and (real / RESOLVED).is_file() else None

    def name_of(self, run_dir: Path) -> str:
        """The path of a run relative to the folder, as pages name it."""
        return os.path.relpath(run_dir, self.folder)

    def listed(self) -> list[dict[str, Any]]:
        """The facts of all runs, with `dir`, what pages call them."""
        found = []
        for run_dir in find_runs(self.folder):
            now = signature(run_dir)
            known = self._facts.get(run_dir)
            if known is None or known[0] != now or known[1]["state"] in ("running", "waiting"):
                known = now, {**facts(run_dir), "dir": self.name_of(run_dir)}
                self._facts[run_dir] = known
            found.append(known[1])
        return found

    def read(self, run_dirs: Sequence[Path]) -> list[RunRecord]:
        """The records of runs that are shown on one page. Raises what `read_run` does."""
        points = points_of(len(run_dirs))
        return [self._read(run_dir, points) for run_dir in run_dirs]

    def _read(self, run_dir: Path, points: int) -> RunRecord:
        key, now = (run_dir, points), signature(run_dir)
        with self._lock:
            known = self._records.get(key)
            if known is not None and known[0] == now:
                self._records.move_to_end(key)
                return known[1]
        record = read_run(run_dir, points)
        with self._lock:
            self._records[key] = now, record
            while len(self._records) > _KEPT:
                self._records.popitem(last=False)
        return record


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
