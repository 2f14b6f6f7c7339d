"""The machine that a run is on: what it is made of, how busy it is, and what of git is checked out there.

For the run's own record, its report and its trackers. What GPUs are asked is base/gpus'.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kubetune.base import cgroup, reminders
from kubetune.base.gpus import gpu_use
from kubetune.base.jsonl import Appender
from kubetune.base.logs import family_logger
from kubetune.base.processes import COMMAND, command_line, usable_cores
from kubetune.errors import EnvironmentFault
from kubetune.rundir import metrics

_FIRST_SECONDS, _LONGEST_SECONDS, _LOOKS = 1.0, 15.0, 60
"""Between looks at a machine: short at first, so that short runs have curves, and longer the longer a run takes."""

_HERE = Path()  # not its name: the folder may have been deleted by now

_log = family_logger("FILES")


def describe() -> dict[str, Any]:
    """Make-up of this machine, and the command and code by which the run was started.

    The code is git's of the current folder, which is where people start what is theirs.
    """
    gpus = gpu_use()
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_bytes": _memory_bytes(),
        "gpus": [gpu["name"] for gpu in gpus],
        "driver": gpu_driver() if gpus else None,
        "command": os.environ.get(COMMAND) or command_line(),
        "git_commit": git_commit(),
        "git_dirty": git_is_dirty(),
        "versions": metrics.versions(),
    }


def cpu_model(info: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name in shops, or its architecture where the system does not tell."""
    with suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE):
            return found[1]
    return platform.processor() or platform.machine()


def gpu_driver(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The version of NVIDIA's driver; None where there is none."""
    with suppress(OSError):
        if found := re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", file.read_text()):
            return found[1]
    return None


def git_commit(folder: Path = _HERE) -> str | None:
    """The commit that is checked out in a folder; None where git, or a repository, is missing."""
    return _git(folder, "rev-parse", "HEAD")


def git_is_dirty(folder: Path = _HERE) -> bool | None:
    """Files that git knows were changed since that commit; None as above."""
    said = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return None if said is None else bool(said)


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _memory_bytes() -> int:
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(there, cgroup.memory_limit() or there)


class Load:
    """Load of this machine between two looks at it; `folder` says which disk is meant."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._before = folder, self._counters()

    def look(self) -> dict[str, Any]:
        """Percent of the CPUs, bytes of memory, bytes a second to and from disks, free bytes, and each GPU.

        A GPU has `index`, and `percent`, `memory_bytes` and `watts` where it tells; what nobody tells is left out.
        """
        import psutil

        after, before = self._counters(), self._before
        self._before = after
        seconds = max(after["time"] - before["time"], 1e-9)
        memory = psutil.virtual_memory()
        found = {
            "cpu_percent": 100
            * (after["busy"] - before["busy"])
            / max(after["cpu"] - before["cpu"], 1e-9),
            "memory_bytes": memory.used,
            "memory_percent": memory.percent,
        }
        if "disk" in after and "disk" in before:
            found["disk_bytes_per_second"] = (after["disk"] - before["disk"]) / seconds
        with suppress(OSError):
            found["disk_free_bytes"] = psutil.disk_usage(str(self._folder)).free
        return {**found, "gpus": [_use_of(gpu) for gpu in gpu_use()]}

    @staticmethod
    def _counters() -> dict[str, float]:
        import psutil

        times = psutil.cpu_times()._asdict()
        idle = times["idle"] + times.get("iowait", 0.0)
        total = (
            sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)
        )  # they are in others, too
        found = {"time": time.monotonic(), "cpu": total, "busy": total - idle}
        with suppress(OSError, RuntimeError):  # some containers tell nothing of disks
            if (disks := psutil.disk_io_counters()) is not None:
                found["disk"] = float(disks.read_bytes + disks.write_bytes)
        return found


def _use_of(gpu: dict[str, Any]) -> dict[str, Any]:
    used = gpu["memory_used_mib"]
    told = {
        "percent": gpu["utilization_percent"],
        "memory_bytes": used * 2**20 if isinstance(used, int | float) else None,
        "watts": gpu["power_watts"],
    }
    numbers = {name: value for name, value in told.items() if isinstance(value, int | float)}
    return {"index": gpu["index"], **numbers}


@contextmanager
def recorded(
    run_dir: Path, step: Callable[[], int], told: Callable[[dict[str, Any]], None]
) -> Iterator[None]:
    """Within, how busy the machine is goes to load.jsonl now and then, with the steps that are completed by then.

    `told` hears it too, in a thread. A disk that takes no more of it ends the record, not the run.
    """
    load = Load(run_dir)

    def note(ended: threading.Event) -> None:
        began = time.monotonic()
        try:
            with Appender(run_dir / metrics.LOAD) as file:
                while not ended.wait(_pause(time.monotonic() - began)):
                    found = load.look()
                    told(found)
                    file.append({"time": metrics.now(), "step": step(), **found})
        except (EnvironmentFault, OSError) as error:
            _log.warning("%s gets no more lines: %s", metrics.LOAD, error)

    with reminders.beside(note, "machine-load"):
        yield


def _pause(elapsed: float) -> float:
    return min(_LONGEST_SECONDS, max(_FIRST_SECONDS, elapsed / _LOOKS))
