"""Bounds of the reward process: what code that rewards answers cannot take, reach or leave behind.

It has nothing of the run's environment, a temporary folder, no more memory and larger files than are allowed, and, if the
kernel lets an ordinary process have them:

    namespaces      no network, no other processes, host name, queues or shared memory, and no process that outlives it
    mounts          nothing of the machine's files can be changed (mounts.py)
    capabilities    none, also not for root
    system calls    no sockets, no keys, no memory of other processes (system_calls.py)
    Landlock        no file is written outside of its folder, and no signal leaves it

docs/grpo.md has a table of what this keeps functions from, which a test tries row by row.

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
from typing import Any, Final

from kubetune.scoring.rewards import mounts, system_calls

_NEW_MOUNTS: Final = 0x00020000
_NEW_HOST_NAME: Final = 0x04000000
_NEW_QUEUES: Final = 0x08000000
_NEW_USER: Final = 0x10000000
_NEW_PROCESSES: Final = 0x20000000
_NEW_NETWORK: Final = 0x40000000

LARGEST_FILE_BYTES: Final = 256 * 2**20
MOST_OPEN_FILES: Final = 256
# Processes that functions may have at a time.
MOST_PROCESSES: Final = 128
# Exit code of the reward process if they had more.
TOO_MANY_PROCESSES: Final = 117
_LOOK_SECONDS: Final = 0.05
_NICENESS: Final = 10
# The most that the kernel takes for it, when it looks for a process to end as memory runs out.
_ENDS_FIRST: Final = "1000"

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
_DEVICE_COMMANDS: Final = 1 << 15
_VERSION_WITH_DEVICE_COMMANDS: Final = 5
# Abstract sockets and signals that would leave the confined processes.
_SCOPES: Final = 0b11
_VERSION_WITH_SCOPES: Final = 6

_NO_NEW_PRIVILEGES: Final = 38
_DROP_FROM_BOUNDING_SET: Final = 24
_AMBIENT: Final = 47
_CLEAR_AMBIENT: Final = 4
# The version of the structures of capset(2), with 64 bits for each set.
_CAPABILITY_VERSION: Final = 0x20080522

# Bounds that a kernel may refuse, and what functions can do then.
WITHOUT: Final = {
    "namespaces": "see other processes, change modes and times of your files, and leave processes behind",
    "mounts": "see other processes, and change modes and times of your files",
    "capabilities": "use the special rights of root",
    "system calls": "connect to sockets on the disk, and change limits of processes that they see",
    "Landlock": "write to pipes on the disk, and send signals to processes that they see",
}


def consequences(refused: list[str]) -> str:
    """Return the bounds that a kernel refuses, each with what functions can do without it."""
    return "; ".join(f"{name} (functions can {WITHOUT[name]})" for name in refused)


def limit(memory_bytes: int) -> None:
    """Bound what this process and its children may take: memory and files each, processes together."""
    # Files without a name (memfd) and many processes take more than each may: where memory ends, these end first.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_ENDS_FIRST)
    # All of the user's processes may count, so those that are there already are let be.
    tasks = _number_of_tasks() + MOST_PROCESSES
    _, most = resource.getrlimit(resource.RLIMIT_NPROC)
    if most == resource.RLIM_INFINITY or tasks < most:
        resource.setrlimit(resource.RLIMIT_NPROC, (tasks, tasks))
    # The watching process goes first.
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE_BYTES, LARGEST_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_OPEN_FILES, MOST_OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def separate() -> bool:
    """Give this process a network without interfaces, and its children a list of processes of their own.

    Return False if the kernel does not allow it. The process forked next is process 1 of the new list: when that ends,
    the kernel kills all that it has started.
    """
    user = os.geteuid()
    group = os.getegid()
    flags = _NEW_NETWORK | _NEW_PROCESSES | _NEW_HOST_NAME | _NEW_QUEUES
    # Root needs no list of users of its own for this, and containers often forbid one.
    if user == 0 and _unshare(flags):
        return True
    if not _unshare(flags | _NEW_USER):
        return False
    # The same user and group as outside. Without a map no file can be made in a tmpfs.
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    except OSError:
        return False
    return True


def confine(folder: str, *, is_separate: bool) -> list[str]:
    """Bound what this process and its children may reach for good. Return the bounds that the kernel refuses.

    `is_separate`: it is process 1 of a list of its own. The names are the keys of WITHOUT.
    """
    refused = []
    if not is_separate:
        refused.append("namespaces")
    elif not _restrict_files(folder):
        refused.append("mounts")
    libc = _libc()
    # The first two of these three need the third.
    if libc is None or libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        return [*refused, "capabilities", "system calls", "Landlock"]
    if not _drop_capabilities(libc):
        refused.append("capabilities")
    if not _confine_by_landlock(libc, folder):
        refused.append("Landlock")
    # Last, since it refuses what the others do.
    if not system_calls.refuse():
        refused.append("system calls")
    return refused


def _libc() -> Any:
    """Return the C library, None on systems without these calls."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        _ = libc.unshare, libc.prctl, libc.mount, libc.capset
    except (OSError, AttributeError):
        return None
    return libc


def _unshare(flags: int) -> bool:
    libc = _libc()
    return libc is not None and libc.unshare(flags) == 0


def _restrict_files(folder: str) -> bool:
    # The process that watches this one keeps the /proc that shows both.
    if not _unshare(_NEW_MOUNTS):
        return False
    try:
        mounts.restrict(folder, LARGEST_FILE_BYTES)
    except OSError:
        return False
    return True


def _drop_capabilities(libc: Any) -> bool:
    """Give up all capabilities. Return False if some are left."""
    # Fails for those that may not, who have none to lose, and beyond the last that the kernel knows.
    for capability in range(64):
        libc.prctl(_DROP_FROM_BOUNDING_SET, capability, 0, 0, 0)
    libc.prctl(_AMBIENT, _CLEAR_AMBIENT, 0, 0, 0)
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    # Effective, permitted and inheritable, the lower 32 bits of each, then the upper.
    return bool(libc.capset(header, bytes(24)) == 0)


def _confine_by_landlock(libc: Any, folder: str) -> bool:
    """Let this process write below a folder, and nowhere else. Return False if that is impossible."""
    call = libc.syscall
    version = call(_CREATE_RULESET, None, 0, 1)
    if version < _FIRST_VERSION:
        return False

    of_files = _WRITE_FILE | _TRUNCATE
    everything = of_files | _CHANGE_FOLDERS | _REFER
    handled = everything
    scopes = 0
    if version >= _VERSION_WITH_DEVICE_COMMANDS:
        handled |= _DEVICE_COMMANDS
    if version >= _VERSION_WITH_SCOPES:
        scopes = _SCOPES
    # Files, ports, scopes. Older kernels take what is zero beyond what they know.
    ruleset = call(_CREATE_RULESET, struct.pack("=3Q", handled, 0, scopes), 24, 0)
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
        return bool(call(_RESTRICT_SELF, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


def watch(child: int) -> int:
    """Wait for process 1 of a list of processes, and kill it with its list if that grows too long.

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
