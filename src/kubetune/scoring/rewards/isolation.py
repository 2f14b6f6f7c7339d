"""Bounds of the reward process: what code that rewards answers cannot take, reach or leave behind.

It has an empty environment, a temporary folder, no more memory and larger files than are allowed, and, where the
kernel lets an ordinary process have them:

    namespaces    no network, no sight of other processes, and no process that outlives it
    Landlock      no file is written outside of its folder

The kernel's own limit of processes (RLIMIT_NPROC) does not hold for root. So they are counted from outside too, by a
process that goes first wherever there is a queue for the processors.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
import time
from pathlib import Path
from typing import Final

_NEW_USER: Final = 0x10000000
_NEW_PROCESSES: Final = 0x20000000
_NEW_NETWORK: Final = 0x40000000

LARGEST_FILE_BYTES: Final = 256 * 2**20
MOST_OPEN_FILES: Final = 256
# Processes that functions may have at a time.
MOST_PROCESSES: Final = 128
# Exit code of the reward process where they had more.
TOO_MANY_PROCESSES: Final = 117
_LOOK_SECONDS: Final = 0.05
_NICENESS: Final = 10

# Landlock's calls, which have the same numbers on all machines, and its rights (linux/landlock.h).
_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446
_WRITE_FILE: Final = 1 << 1
_CHANGE_FOLDERS: Final = 0b1_1111_1111 << 4  # remove and make files and folders of all kinds
_REFER: Final = 1 << 13
_TRUNCATE: Final = 1 << 14
# The version of the interface that brought both.
_FIRST_VERSION: Final = 3
_NO_NEW_PRIVILEGES: Final = 38


def limit(memory_bytes: int) -> None:
    """Bound what this process and its children may take: memory and files each, processes together."""
    # All of the user's processes may count, so those that are there already are let be.
    tasks = _number_of_tasks() + MOST_PROCESSES
    _, most = resource.getrlimit(resource.RLIMIT_NPROC)
    if most == resource.RLIM_INFINITY or tasks < most:
        resource.setrlimit(resource.RLIMIT_NPROC, (tasks, tasks))
    # What watches goes first.
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE_BYTES, LARGEST_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_OPEN_FILES, MOST_OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def separate() -> bool:
    """Give this process a network without interfaces, and its children a list of processes of their own.

    Return False where the kernel does not allow it. What is forked next is process 1 of the new list: when that ends,
    the kernel kills all that it has started.
    """
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        unshare = libc.unshare
    except (OSError, AttributeError):
        return False

    # Root needs no list of users of its own for this, and containers often forbid one.
    flags = _NEW_NETWORK | _NEW_PROCESSES
    if os.geteuid() != 0:
        flags |= _NEW_USER
    return bool(unshare(flags) == 0)


def confine(folder: str) -> bool:
    """Let this process and its children write below a folder, and nowhere else. Return False where that cannot be."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        call = libc.syscall
        prctl = libc.prctl
    except (OSError, AttributeError):
        return False
    if call(_CREATE_RULESET, None, 0, 1) < _FIRST_VERSION:
        return False

    of_files = _WRITE_FILE | _TRUNCATE
    everything = of_files | _CHANGE_FOLDERS | _REFER
    ruleset = call(_CREATE_RULESET, struct.pack("Q", everything), 8, 0)
    if ruleset < 0:
        return False
    try:
        for path, rights in (
            (folder, everything),
            ("/dev/shm", everything),
            ("/dev/null", of_files),
        ):
            if not os.path.exists(path):
                continue
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            # The rights, and below which file or folder they hold.
            is_added = call(_ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, place), 0) == 0
            os.close(place)
            if not is_added:
                return False
        if prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
            return False
        return bool(call(_RESTRICT_SELF, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


def watch(child: int) -> int:
    """Wait for process 1 of a list of processes, and kill it with its list where that grows too long.

    Return the exit code to end with.
    """
    usual = _number_of_tasks()
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status) & 0xFF
        # One small file says how many there are on the whole machine; only if these are more, ours are counted.
        tasks = _number_of_tasks()
        usual = min(usual, tasks)
        if tasks > usual + MOST_PROCESSES:
            if _number_in_list_of(child) > MOST_PROCESSES:
                # Its list ends once it has been scheduled, which among thousands takes minutes.
                with contextlib.suppress(PermissionError):
                    os.setpriority(os.PRIO_PROCESS, child, os.getpriority(os.PRIO_PROCESS, 0))
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return TOO_MANY_PROCESSES
            usual = tasks
        time.sleep(_LOOK_SECONDS)


def _number_of_tasks() -> int:
    """Return how many processes and threads the machine has, as the fourth number of its load says: 1/523."""
    try:
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    except (OSError, IndexError, ValueError):
        return 0


def _number_in_list_of(child: int) -> int:
    """Return how many processes share the list of a process."""
    try:
        ours = os.stat(f"/proc/{child}/ns/pid").st_ino
    except OSError:
        return 0
    number = 0
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            number += os.stat(f"/proc/{name}/ns/pid").st_ino == ours
        except OSError:
            continue  # it has ended meanwhile, or is another user's
    return number
