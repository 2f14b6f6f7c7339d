"""Clock and memory inside a measured process, the same for every trainer. Standard library only.

A driver calls `begin` when training starts, `step` and `epoch` as they end, and prints `result`.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

RESULT = "RESULT "
"""What the line that the harness reads begins with."""
STEP = "STEP "
"""What begins a line that kubetune's driver prints after each step."""


class Recorder:
    """`started`: what time.monotonic() was when the process was started; the clock is that of the whole machine."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._marks: list[tuple[float, float]] = []
        self._first_step: float | None = None
        self._first_step_cpu: float | None = None
        self._rss_before = 0
        self.losses: list[float] = []

    def begin(self) -> None:
        """The model is loaded and training starts."""
        self._rss_before = resident_bytes()
        self._mark()

    def step(self) -> None:
        """An optimizer step is done."""
        if self._first_step is None:
            synchronise()
            self._first_step, self._first_step_cpu = (
                time.monotonic() - self._started,
                cpu_seconds(os.getpid()),
            )

    def epoch(self) -> None:
        """An epoch is done."""
        self._mark()

    def _mark(self) -> None:
        synchronise()
        self._marks.append((time.perf_counter(), time.process_time()))

    def result(self, tokens_per_epoch: int, **facts: Any) -> dict[str, Any]:
        """Seconds of each epoch by the wall and in CPU time of this process, losses of the steps, memory in bytes."""
        torch = sys.modules.get("torch")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        found = {
            "tokens_per_epoch": tokens_per_epoch,
            "epoch_seconds": _differences(wall for wall, _ in self._marks),
            "epoch_cpu_seconds": _differences(cpu for _, cpu in self._marks),
            "first_step_seconds": self._first_step,
            "first_step_cpu_seconds": self._first_step_cpu,
            "losses": self.losses,
            "peak_bytes": peak,
            "peak_above_start_bytes": peak - self._rss_before,
            "threads_used": torch.get_num_threads() if torch else None,
            "versions": versions(),
        }
        if torch and torch.cuda.is_available():
            found["peak_device_bytes"] = torch.cuda.max_memory_allocated()
        return found | facts


def synchronise() -> None:
    """Wait for the GPU, whose work is otherwise still under way when Python goes on."""
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_available():
        torch.cuda.synchronize()


def resident_bytes() -> int:
    """Memory of this process now (Linux)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and all below it until now, those that have ended too (Linux)."""
    with open(f"/proc/{pid}/stat") as file:
        ticks = sum(map(int, file.read().rpartition(")")[2].split()[11:15]))
    below: set[int] = set()
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as file:
            below.update(map(int, file.read().split()))
    return ticks / os.sysconf("SC_CLK_TCK") + sum(map(cpu_seconds, below))


def versions() -> dict[str, str]:
    """Versions of the libraries that this process has loaded."""
    names = (
        "torch",
        "transformers",
        "peft",
        "trl",
        "accelerate",
        "datasets",
        "tokenizers",
        "llamafactory",
    )
    loaded = {name: getattr(sys.modules.get(name), "__version__", None) for name in names}
    return {"python": sys.version.split()[0]} | {name: str(v) for name, v in loaded.items() if v}


def report(facts: dict[str, Any]) -> None:
    """Hand a measurement to the harness."""
    print(RESULT + json.dumps(facts), flush=True)


def _differences(values: Iterable[float]) -> list[float]:
    return [after - before for before, after in pairwise(values)]
