"""The machine of a run: its parts, how busy it is, the versions of its libraries, and what git has checked out there.

For the run's own record, its report and its trackers. base/gpus asks the GPUs.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kubetune.base import cgroup, reminders
from kubetune.base.cpu import processor
from kubetune.base.gpus import gpu_use
from kubetune.base.jsonl import Appender
from kubetune.base.logs import family_logger
from kubetune.base.processes import COMMAND, command_line, usable_cores
from kubetune.errors import EnvironmentFault
from kubetune.rundir import metrics

# Seconds between two measurements: few at first, so that short runs have curves, more the longer a run takes.
_FIRST_SECONDS = 1.0
_LONGEST_SECONDS = 15.0
_MEASUREMENTS = 60  # so many at most before the pauses grow

_CURRENT_FOLDER = Path()  # not its absolute path: the folder may have been deleted by now

_log = family_logger("FILES")


def slug(machine: Mapping[str, Any]) -> str:
    """Return a machine as a part of a file name: `amd-epyc-2-cores`, `nvidia-h200`.

    `machine`: with its `gpu`, `cpu` and `cores`, as results of measurements have it.
    """
    text = machine["gpu"] or f"{machine['cpu']} {machine['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def describe() -> dict[str, Any]:
    """Return the parts of this machine, and the command and the code that started the run.

    The code is the commit that git has checked out in the current folder, where people start their own runs.
    """
    gpus = gpu_use()
    driver = None
    if gpus:
        driver = gpu_driver()
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "cpu": processor.model_name(),
        "cores": usable_cores(),
        "memory_bytes": _memory_bytes(),
        "gpus": [gpu["name"] for gpu in gpus],
        "driver": driver,
        "command": os.environ.get(COMMAND) or command_line(),
        "git_commit": git_commit(),
        "git_dirty": git_is_dirty(),
        "versions": versions(),
    }


def gpu_driver(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of NVIDIA's driver, None where there is none."""
    # The file's first line:  NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  …
    with suppress(OSError):
        match = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", file.read_text())
        if match:
            return match[1]
    return None


def git_commit(folder: Path = _CURRENT_FOLDER) -> str | None:
    """Return the commit that is checked out in a folder, None where git or a repository is missing."""
    return _git(folder, "rev-parse", "HEAD")


def git_is_dirty(folder: Path = _CURRENT_FOLDER) -> bool | None:
    """True if files that git knows were changed since that commit, None where git or a repository is missing."""
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    if changes is None:
        return None
    return bool(changes)


def _git(folder: Path, *words: str) -> str | None:
    """Return what a git command prints, None where it fails or git is missing."""
    try:
        done = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode != 0:
        return None
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Return the versions of what numbers may depend on."""
    by_name = {"python": platform.python_version()}
    for package in ("kubetune", "torch", "transformers", "peft", "tokenizers"):
        with suppress(PackageNotFoundError):
            by_name[package] = version(package)
    return by_name


def _memory_bytes() -> int:
    """Return the memory of this machine, or of the container if that may use less."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # A container without a limit may use all of it.
    limit = cgroup.memory_limit() or physical
    return min(physical, limit)


class Load:
    """How busy this machine was between two measurements. `folder` says which disk is meant."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = self._counters()

    def measure(self) -> dict[str, Any]:
        """Return the load since the measurement before. What the system does not say is left out.

        Percent of the CPUs, bytes of memory, bytes a second to and from disks, free bytes, and `gpus`, each with
        `index`, `percent`, `memory_bytes` and `watts`.
        """
        import psutil

        # Counters of the system only grow, so two readings make a speed.
        before = self._before
        after = self._counters()
        self._before = after
        seconds = max(after["time"] - before["time"], 1e-9)
        cpu_seconds = max(after["cpu"] - before["cpu"], 1e-9)

        memory = psutil.virtual_memory()
        load = {
            "cpu_percent": 100 * (after["busy"] - before["busy"]) / cpu_seconds,
            "memory_bytes": memory.used,
            "memory_percent": memory.percent,
        }

        # A disk may be missing from the counters, and the folder may have been deleted.
        if "disk" in after and "disk" in before:
            load["disk_bytes_per_second"] = (after["disk"] - before["disk"]) / seconds
        with suppress(OSError):
            load["disk_free_bytes"] = psutil.disk_usage(str(self._folder)).free
        return {**load, "gpus": [_load_of(gpu) for gpu in gpu_use()]}

    @staticmethod
    def _counters() -> dict[str, float]:
        """Return what the system has counted since it started: seconds of its CPUs, and bytes of its disks."""
        import psutil

        times = psutil.cpu_times()._asdict()
        # The system counts the seconds of guests as user and nice, too.
        guests = times.get("guest", 0.0) + times.get("guest_nice", 0.0)
        total = sum(times.values()) - guests
        # A CPU that waits for a disk could compute.
        idle = times["idle"] + times.get("iowait", 0.0)
        counters = {"time": time.monotonic(), "cpu": total, "busy": total - idle}
        with suppress(OSError, RuntimeError):  # some containers say nothing of disks
            disks = psutil.disk_io_counters()
            if disks is not None:
                counters["disk"] = float(disks.read_bytes + disks.write_bytes)
        return counters


def _load_of(gpu: dict[str, Any]) -> dict[str, Any]:
    """Return the load of a GPU. Some GPUs do not say all of it: nvidia-smi then prints a word for the number."""
    load = {"index": gpu["index"]}
    percent = gpu["utilization_percent"]
    if isinstance(percent, int | float):
        load["percent"] = percent
    mebibytes = gpu["memory_used_mib"]
    if isinstance(mebibytes, int | float):
        load["memory_bytes"] = mebibytes * 2**20
    watts = gpu["power_watts"]
    if isinstance(watts, int | float):
        load["watts"] = watts
    return load


@contextmanager
def recorded(
    run_dir: Path, step: Callable[[], int], listener: Callable[[dict[str, Any]], None]
) -> Iterator[None]:
    """Write within the block, now and then, how busy the machine is to load.jsonl, with the number of completed steps.

    `listener` gets each measurement too, in a thread. A disk that takes no more lines ends the record, not the run.
    """
    load = Load(run_dir)

    def record(ended: threading.Event) -> None:
        began = time.monotonic()
        try:
            # The pauses grow with the length of the run, so the file stays short.
            with Appender(run_dir / metrics.LOAD) as file:
                while not ended.wait(_pause(time.monotonic() - began)):
                    values = load.measure()
                    listener(values)
                    file.append({"time": metrics.now(), "step": step(), **values})
        except (EnvironmentFault, OSError) as error:
            _log.warning("%s gets no more lines: %s", metrics.LOAD, error)

    with reminders.beside(record, "machine-load"):
        yield


def _pause(elapsed: float) -> float:
    """Return the seconds until the next measurement, for a run of this age."""
    # 30 s old: 1 s.  5 min: 5 s.  An hour: 15 s.
    return min(_LONGEST_SECONDS, max(_FIRST_SECONDS, elapsed / _MEASUREMENTS))
