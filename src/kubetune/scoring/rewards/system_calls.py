"""System calls that code which rewards answers is refused: sockets, keys, namespaces, other processes' memory and limits.

A read-only file system and Landlock before Linux 7 let a process connect to a socket on the disk, such as Docker's
or an SSH agent's. So it gets no sockets at all, but pairs of streams, which asyncio and multiprocessing need.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import Final

_PR_SET_SECCOMP: Final = 22
_FILTER: Final = 2
_ALLOW: Final = 0x7FFF0000
_REFUSE: Final = 0x00050000  # with the errno in the lowest bits

# Instructions of the kernel's filter programs (linux/filter.h).
_LOAD: Final = 0x20
_AND: Final = 0x54
_IF_EQUAL: Final = 0x15
_IF_AT_LEAST: Final = 0x35
_IF_ANY_BIT: Final = 0x45
_RETURN: Final = 0x06

# Offsets in `struct seccomp_data`; an argument has 8 bytes, of which the lower half comes first.
_NUMBER: Final = 0
_MACHINE: Final = 4
_FIRST_ARGUMENT: Final = 16
_SECOND_ARGUMENT: Final = 24

# By os.uname().machine: the kernel's number of the machine, and its numbers of calls.
_MACHINES: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CALLS: Final = {
    # name: (x86_64, aarch64)
    "socket": (41, 198),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    # Its requests open sockets past any filter.
    "io_uring_setup": (425, 425),
    # For whole users and groups of processes, as for one.
    "ioprio_set": (251, 30),
}
# These change a process by its number, and this one by the number 0, which alone is allowed.
_OF_THIS_PROCESS: Final = {
    "prlimit64": (302, 261),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
}
# Its first argument says whom its second one numbers: 0 is a process.
_SETPRIORITY: Final = (141, 140)
_CLONE: Final = (56, 220)
_CLONE3: Final = (435, 435)
_SOCKETPAIR: Final = (53, 199)
# Flags of `clone` for namespaces of all kinds.
_NEW_NAMESPACES: Final = 0x7E02_0000
# Kinds of sockets: the bits that hold the kind, streams, and sequences of packets.
_KIND: Final = 0xF
_STREAM: Final = 1
_PACKETS: Final = 5
# The calls of a second interface of x86_64, with numbers of its own.
_OTHER_INTERFACE: Final = 0x4000_0000


def refuse() -> bool:
    """Refuse the calls to this process and its children, for good. Return False if the kernel cannot.

    Only after PR_SET_NO_NEW_PRIVS.
    """
    machine = os.uname().machine
    if machine not in _MACHINES:
        return False
    program = _program(machine)
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions, of 8 bytes each, and where they are.
    head = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(_PR_SET_SECCOMP, _FILTER, head, 0, 0) == 0)


def _program(machine: str) -> bytes:
    """Return the filter of a machine."""
    column = list(_MACHINES).index(machine)
    refused = _instruction(_RETURN, _REFUSE | errno.EACCES)
    allowed = _instruction(_RETURN, _ALLOW)
    program = [
        # Calls of another machine (32 bits) have other numbers.
        _instruction(_LOAD, _MACHINE),
        _instruction(_IF_EQUAL, _MACHINES[machine], if_true=1),
        refused,
        _instruction(_LOAD, _NUMBER),
        _instruction(_IF_AT_LEAST, _OTHER_INTERFACE, if_false=1),
        refused,
    ]
    for numbers in _CALLS.values():
        program += [_instruction(_IF_EQUAL, numbers[column], if_false=1), refused]
    program += _limits_of_others(column)
    # Its flags are in memory, which a filter cannot read. glibc then calls `clone`.
    unknown = _instruction(_RETURN, _REFUSE | errno.ENOSYS)
    program += [_instruction(_IF_EQUAL, _CLONE3[column], if_false=1), unknown]
    program += [
        _instruction(_IF_EQUAL, _CLONE[column], if_false=4),
        _instruction(_LOAD, _FIRST_ARGUMENT),
        _instruction(_IF_ANY_BIT, _NEW_NAMESPACES, if_false=1),
        refused,
        allowed,
    ]
    # A pair of datagrams may still be connected to a socket on the disk; a pair of streams is connected for good.
    program += [
        _instruction(_IF_EQUAL, _SOCKETPAIR[column], if_false=5),
        _instruction(_LOAD, _SECOND_ARGUMENT),
        _instruction(_AND, _KIND),
        _instruction(_IF_EQUAL, _STREAM, if_true=2),
        _instruction(_IF_EQUAL, _PACKETS, if_true=1),
        refused,
        allowed,
    ]
    return b"".join(program)


def _limits_of_others(column: int) -> list[bytes]:
    """Return what refuses to change limits, priority or processors of any process but the one that calls."""
    refused = _instruction(_RETURN, _REFUSE | errno.EACCES)
    allowed = _instruction(_RETURN, _ALLOW)
    program = []
    for numbers in _OF_THIS_PROCESS.values():
        program += [
            _instruction(_IF_EQUAL, numbers[column], if_false=4),
            _instruction(_LOAD, _FIRST_ARGUMENT),
            _instruction(_IF_EQUAL, 0, if_false=1),
            allowed,
            refused,
        ]
    program += [
        _instruction(_IF_EQUAL, _SETPRIORITY[column], if_false=6),
        _instruction(_LOAD, _FIRST_ARGUMENT),
        _instruction(_IF_EQUAL, 0, if_false=3),
        _instruction(_LOAD, _SECOND_ARGUMENT),
        _instruction(_IF_EQUAL, 0, if_false=1),
        allowed,
        refused,
    ]
    return program


def _instruction(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return an instruction: what it does, how many to skip, and a number."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
