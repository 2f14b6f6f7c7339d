"""Ties between the processes of a run: no process outlives the one that started it.

After a kill -9 of the first process, no rank may go on writing checkpoints. A dead process can do nothing about that, so
the kernel is asked to. Linux only; on other systems these functions change nothing. The supervisor starts the ranks.
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

# Environment variable with the process id of the agent, for every process below it.
AGENT_PID = "KUBETUNE_AGENT_PID"

# Environment variable of ranks: the command that started their run.
COMMAND = "KUBETUNE_COMMAND"

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
# Loaded at import: between fork and exec a child must not take the loader's lock.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel kill this process, or signal it, when its parent ends for any reason.

    Every rank calls this first, and so does a process between fork and exec. The setting survives exec but not fork. If
    the agent of the environment is dead already, this process ends here.
    """
    if _libc is None:
        return
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    agent = os.environ.get(AGENT_PID)
    if agent and not is_alive(int(agent)):
        os.kill(os.getpid(), signal.SIGKILL)


def work_for_parent() -> None:
    """Let this process end with its parent, and ignore requests to stop. For processes that prepare data.

    SIGTERM and Ctrl-C often go to a whole group. The parent has something to save, so it alone acts on them.
    """
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def hide_memory() -> None:
    """Let no process of the same user read this one's memory, environment or open files, nor trace it.

    It lasts until the next exec. Children that are forked inherit it. Debuggers, py-spy and core dumps need root then.
    """
    if _libc is not None:
        _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def leave(code: int) -> NoReturn:
    """Flush all output and end this process at once. A normal end of torch takes seconds of the grace time."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def module(name: str, *arguments: object) -> list[str]:
    """Return the command that runs one of our modules."""
    # -P: else a file random.py in the current folder would replace the library's.
    return [sys.executable, "-P", "-m", name, *map(str, arguments)]


def command_line() -> str:
    """Return the command that started this process, as a user would type it."""
    program = Path(sys.argv[0])
    modules = {"__main__": "kubetune", "agent": "kubetune.agent", "worker": "kubetune.worker"}
    if program.stem in modules:
        command = f"python -m {modules[program.stem]}"
    else:
        command = shlex.quote(program.name)
    return " ".join([command, *map(shlex.quote, sys.argv[1:])])


def start_companion(name: str, *arguments: object) -> subprocess.Popen[bytes]:
    """Start one of our modules beside a run. Its standard input ends when the run does.

    It gets its own session: Ctrl-C is for the run, and the companion still has to report how the run ended.
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
    """Return `environ` for a process whose Python children must not import files of the current folder either."""
    return {**environ, "PYTHONSAFEPATH": "1"}


@contextlib.contextmanager
def output_on_stderr() -> Iterator[None]:
    """Send standard output of this process and its children to standard error while the block runs."""
    sys.stdout.flush()
    kept = os.dup(1)
    # Also for children and for C code, which write to file descriptor 1.
    os.dup2(2, 1)
    try:
        # Also replace sys.stdout: in notebooks and in captures it is not file descriptor 1.
        with contextlib.redirect_stdout(sys.stderr):
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
    """True if a process runs. A zombie, which has ended but was not waited for, does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        # `4711 (python -m x) S 1 …`: the state follows the command, which may itself hold spaces and brackets.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX"
    except FileNotFoundError:
        return sys.platform != "linux"
    except ProcessLookupError:
        # It ended after its file had been opened.
        return False


def children(pid: int) -> list[int]:
    """Return the ids of processes that `pid` started or adopted and has not waited for. Empty without /proc."""
    ids: list[int] = []
    # The process may end while this looks, and so may one of its threads.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for of_thread in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                ids += [int(child) for child in of_thread.read_text().split()]
    return ids


def kill_children(kept: Collection[int] = ()) -> None:
    """Kill all processes below this one, except for the children `kept`, and wait until they have ended."""
    # The children of a process that dies become ours (`adopt_orphans`), so look again until none is left.
    while pids := set(children(os.getpid())) - set(kept):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def try_threads() -> None:
    """Start as many threads at once as torch and its libraries will, and end them. Raise RuntimeError if it cannot.

    torch's C++ code aborts the process without a message if it cannot start a thread. Python raises an error.
    """
    # "4,2" has a number for each level of nested parallel regions.
    setting = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    of_torch = int(setting) if setting.isdecimal() else usable_cores()
    go_on = threading.Event()
    threads: list[threading.Thread] = []
    try:
        for _ in range(2 * of_torch + 8):
            thread = threading.Thread(target=go_on.wait)
            thread.start()
            threads.append(thread)
    finally:
        go_on.set()
        for thread in threads:
            thread.join()


def usable_cores() -> int:
    """Return how many CPU cores this process may use: those it is bound to, or its container's quota if that is less."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    with contextlib.suppress(FileNotFoundError, PermissionError):
        # `max 100000`, or `200000 100000` for two cores.
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def usable_memory_bytes() -> int:
    """Return the memory of this machine, or the limit of the container if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup.memory_limit()
    return total if limit is None else min(total, limit)


def free_memory_bytes() -> int:
    """Return the memory that is still free on this machine, or in the container if that is less. Caches are free."""
    usable = usable_memory_bytes()
    free = usable
    with contextlib.suppress(FileNotFoundError, PermissionError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        facts = dict(line.split(":") for line in lines)  # `MemAvailable:   1234 kB`
        free = min(free, int(facts["MemAvailable"].split()[0]) * 1024)
    with contextlib.suppress(FileNotFoundError, PermissionError):
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        lines = Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
        facts = dict(line.split() for line in lines)  # `file 5678`: bytes of the page cache
        free = min(free, usable - used + int(facts["file"]))
    return free
