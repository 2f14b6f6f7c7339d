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

# What the line that the harness reads begins with.
RESULT = "RESULT "
# What begins a line that kubetune's driver prints after each step.
STEP = "STEP "


class Recorder:
    """What is measured of one training: when it began, when its first step and its epochs ended, its losses."""

    def __init__(self, started: float) -> None:
        # time.monotonic() when the process was started. The clock is that of the whole machine.
        self._started = started
        # By the wall and in CPU time: the beginning, and the end of each epoch.
        self._marks: list[tuple[float, float]] = []
        self._first_step: float | None = None
        self._first_step_cpu: float | None = None
        self._rss_before = 0
        self.losses: list[float] = []  # of each step

    def begin(self) -> None:
        """Mark the start of training. Call it when the model is loaded."""
        self._rss_before = resident_bytes()
        self._mark()

    def step(self) -> None:
        """Mark the end of an optimizer step."""
        if self._first_step is None:
            synchronise()
            self._first_step = time.monotonic() - self._started
            self._first_step_cpu = cpu_seconds(os.getpid())

    def epoch(self) -> None:
        """Mark the end of an epoch."""
        self._mark()

    def _mark(self) -> None:
        # A GPU is behind what Python has asked of it.
        synchronise()
        self._marks.append((time.perf_counter(), time.process_time()))

    def result(self, tokens_per_epoch: int, **facts: Any) -> dict[str, Any]:
        """Return seconds of each epoch by the wall and in CPU time of this process, losses, and memory in bytes."""
        torch = sys.modules.get("torch")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        numbers = {
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
            numbers["peak_device_bytes"] = torch.cuda.max_memory_allocated()
        return numbers | facts


def synchronise() -> None:
    """Wait for the GPU, whose work is otherwise still under way when Python goes on."""
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_available():
        torch.cuda.synchronize()


def resident_bytes() -> int:
    """Return the memory of this process now (Linux)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and all below it until now, those that have ended too (Linux)."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()  # behind the name, which may hold spaces
    # In user and kernel mode, its own and of children that have ended.
    ticks = sum(map(int, fields[11:15]))
    children: set[int] = set()
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as file:
            children.update(map(int, file.read().split()))
    return ticks / os.sysconf("SC_CLK_TCK") + sum(map(cpu_seconds, children))


def versions() -> dict[str, str]:
    """Return the versions of the libraries that this process has loaded."""
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
    result = {"python": sys.version.split()[0]}
    for name in names:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version:
            result[name] = str(version)
    return result


def report(facts: dict[str, Any]) -> None:
    """Hand a measurement to the harness."""
    print(RESULT + json.dumps(facts), flush=True)


def _differences(values: Iterable[float]) -> list[float]:
    return [after - before for before, after in pairwise(values)]
