"""Measure what a pod uses: CPU, memory, /dev/shm and its volumes."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_USAGE_SECONDS = 0.5


def usage() -> dict[str, Any]:
    """Return the CPU cores in use, bytes of memory and of /dev/shm, and bytes free on the volumes.

    Summed over the processes that this container sees, so that no metrics server is needed.
    """
    cpu_seconds = _cpu_seconds()
    began = time.monotonic()
    time.sleep(_USAGE_SECONDS)
    cores = (_cpu_seconds() - cpu_seconds) / (time.monotonic() - began)
    shm = shutil.disk_usage("/dev/shm")
    free = {}
    for name in ("cache", "outputs"):
        if Path(f"/{name}").is_dir():
            free[name] = shutil.disk_usage(f"/{name}").free
    return {
        # Processes that end take their seconds along, so the difference may be negative.
        "cpu_cores": round(max(0.0, cores), 2),
        "memory_bytes": _resident_bytes(),
        "shm_used_bytes": shm.used,
        "shm_total_bytes": shm.total,
        "cache_free_bytes": free.get("cache"),
        "outputs_free_bytes": free.get("outputs"),
    }


def _stats() -> Iterator[list[str]]:
    """Yield the fields of /proc/PID/stat from the third on, for each process but this one."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        if path.parent.name != str(os.getpid()):
            try:
                # The command comes second, in brackets, and may itself hold spaces and brackets.
                yield path.read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue


# proc(5) counts from 1, and `_stats` begins at field 3: field 14 (utime) is index 11, 15 (stime) 12, 24 (rss) 21.
def _cpu_seconds() -> float:
    """Return the CPU time of all processes, in user mode and in the kernel."""
    ticks = 0
    for fields in _stats():
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _resident_bytes() -> int:
    """Return the memory of all processes. Pages that they share count more than once."""
    pages = 0
    for fields in _stats():
        pages += int(fields[21])
    return pages * os.sysconf("SC_PAGE_SIZE")
