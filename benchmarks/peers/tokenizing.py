"""What the tokenisation drivers share: time by the wall, and in CPU seconds with child processes."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import TypeVar

from benchmarks.peers.job import Order

Result = TypeVar("Result")


def processes_of(order: Order) -> int | None:
    """Return `num_proc` as Hugging Face means it: None for no other process than this one."""
    number: int = order.settings["num_proc"]
    return number if number > 1 else None


def timed(work: Callable[[], Result]) -> tuple[Result, dict[str, float]]:
    """Return what `work` returns, and how long it took."""
    start = time.perf_counter()
    start_cpu = _cpu_seconds()
    result = work()
    seconds = time.perf_counter() - start
    return result, {"seconds": seconds, "cpu_seconds": _cpu_seconds() - start_cpu}


def _cpu_seconds() -> float:
    # Tokenisers of other libraries work in processes of their own.
    this = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return this.ru_utime + this.ru_stime + children.ru_utime + children.ru_stime
