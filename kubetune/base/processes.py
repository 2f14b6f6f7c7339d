"""Ties between the processes of a run: nobody outlives whoever started them.

A kill -9 of the first process must not leave ranks behind that go on writing checkpoints, so the kernel is asked to do
what the dead can no longer do. Linux only; elsewhere they change nothing. Not for starting ranks (supervisor).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from kubetune.base import cgroup

AGENT_PID = "KUBETUNE_AGENT_PID"
"""Environment variable by which the agent tells every process below it whom it belongs to."""

COMMAND = "KUBETUNE_COMMAND"
"""In the environment of ranks: what their run was started by."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Looked up at import: between fork and exec a child may not take the loader's lock.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel kill this process, or signal it, when the one that started it ends, however that ends.

    Called by every rank first thing, and between fork and exec by those who start processes. The setting survives
    exec but not fork. When the agent named in the environment has died already, this process ends here.
    """
    if _libc is None:
        return
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    agent = os.environ.get(AGENT_PID)
    if agent and not is_alive(int(agent)):
        os.kill(os.getpid(), signal.SIGKILL)


def work_for_parent() -> None:
    """First act of a process that prepares data: it ends with its parent, and leaves requests to stop to it.

    SIGTERM and Ctrl-C often go to a whole group; only who has something to save may act on them.
    """
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def leave(code: int) -> NoReturn:
    """End this process now, with all written: taking torch apart would take seconds of the grace time."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def module(name: str, *arguments: object) -> list[str]:
    """The command that runs one of our modules. -P: without it files of the current folder stand in for libraries."""
    return [sys.executable, "-P", "-m", name, *map(str, arguments)]


def command_line() -> str:
    """Command that called this process, as one would type it."""
    name = Path(sys.argv[0]).stem
    modules = {"__main__": "kubetune", "agent": "kubetune.agent", "worker": "kubetune.worker"}
    called = (
        f"python -m {modules[name]}" if name in modules else shlex.quote(Path(sys.argv[0]).name)
    )
    return " ".join([called, *(shlex.quote(word) for word in sys.argv[1:])])


def start_companion(name: str, *arguments: object) -> subprocess.Popen[bytes]:
    """Start one of our modules beside a run; the end of its standard input tells it of the run's.

    A session of its own: Ctrl-C is for the run, whose end is still to be told.
    """
    environ = shielded({**os.environ, AGENT_PID: str(os.getpid())})
    return subprocess.Popen(
        module(name, *arguments),
        env=environ,
        stdin=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


def shielded(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for processes that start others of their own, which leave the current folder out too."""
    return {**environ, "PYTHONSAFEPATH": "1"}


@contextlib.contextmanager
def output_on_stderr() -> Iterator[None]:
    """Within, what this process and those it starts write to standard output goes to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(
            sys.stderr
        ):  # notebooks and captures have a sys.stdout that is not file descriptor 1
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that `kill_children` finds them."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def is_alive(pid: int) -> bool:
    """Life of a process: one that ended and was not yet waited for does not count."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        # The state follows the command, which is in brackets and may itself hold spaces and brackets.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return sys.platform != "linux"


def children(pid: int) -> list[int]:
    """Processes started by `pid`, or adopted by it, that were not yet waited for. Empty where /proc does not tell."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a process that goes just now
        for listing in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(
                FileNotFoundError, ProcessLookupError
            ):  # a thread of one that stays
                found += [int(child) for child in listing.read_text().split()]
    return found


def kill_children(spared: Collection[int] = ()) -> None:
    """Kill everything below this process, but for the children `spared`, and wait until it is gone."""
    # Each death hands its own children up to us, so look again until nobody is left.
    while pids := set(children(os.getpid())) - set(spared):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def try_threads() -> None:
    """Start as many threads at once as torch and its libraries will, and end them. Raises what Python does.

    C++ that is refused a thread ends the process without a word that anybody could pass on.
    """
    asked = (
        os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    )  # "4,2" is of nested regions
    count, go_on = 2 * (int(asked) if asked.isdecimal() else usable_cores()) + 8, threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=go_on.wait)
            thread.start()
            started.append(thread)
    finally:
        go_on.set()
        for thread in started:
            thread.join()


def usable_cores() -> int:
    """CPU cores this process may use: those it is bound to, less where a container's quota is lower."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    with contextlib.suppress(FileNotFoundError, PermissionError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def usable_memory_bytes() -> int:
    """Memory of this machine, or of the container where that has less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup.memory_limit()
    return total if limit is None else min(total, limit)


def free_memory_bytes() -> int:
    """Memory that can still be had, of this machine or of the container where that has less; caches count as free."""
    free = usable_memory_bytes()
    with contextlib.suppress(FileNotFoundError, PermissionError):
        facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = min(free, int(facts["MemAvailable"].split()[0]) * 1024)
    with contextlib.suppress(FileNotFoundError, PermissionError):
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        facts = dict(
            line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
        )
        free = min(free, usable_memory_bytes() - used + int(facts["file"]))
    return free
