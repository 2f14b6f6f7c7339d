"""What the tokenisation drivers share: the rows, and time by the wall and in CPU seconds with child processes."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers.job import Order


def text_of(order: Order) -> list[dict[str, str]]:
    """The rows, `prompt` and `completion`."""
    with Path(order.data).open() as file:
        return [json.loads(line) for line in file]


def processes_of(order: Order) -> int | None:
    """`num_proc` as Hugging Face means it, where one process means no other."""
    return order.settings["num_proc"] if order.settings["num_proc"] > 1 else None


def timed(work: Callable[[], int], rows: int) -> dict[str, Any]:
    """Carry out `work`, which returns the number of tokens made."""
    began, cpu = time.perf_counter(), _cpu_seconds()
    tokens = work()
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "cpu_seconds": _cpu_seconds() - cpu, "rows": rows, "tokens": tokens}


def _cpu_seconds() -> float:
    found = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in found)
