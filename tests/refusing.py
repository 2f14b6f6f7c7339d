"""Has the kernel refuse system calls to a command and all it starts: `python tests/refusing.py flock=ENOLCK COMMAND…`.

    clone&0x10000=EAGAIN      only where this bit of the call's flags is set: here, no new threads

By seccomp, so that C and C++ meet it too. Where the kernel or the machine has none, `is_possible` says so.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

NUMBERS = {
    "x86_64": {
        "write": 1, "pwrite64": 18, "connect": 42, "clone": 56, "flock": 73, "fsync": 74, "ftruncate": 77, "rename": 82,
        "mkdir": 83, "unlink": 87, "symlink": 88, "openat": 257, "clone3": 435,
    },
    "aarch64": {
        "write": 64, "pwrite64": 68, "connect": 203, "clone": 220, "flock": 32, "fsync": 82, "ftruncate": 46,
        "rename": 38, "mkdir": 34, "unlink": 35, "symlink": 36, "openat": 56, "clone3": 435,
    },
}  # fmt: skip
_FLAGS_ARGUMENT = {"openat": 2, "clone": 0}

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER = 22, 38, 2
_LOAD, _IF_EQUAL, _IF_BITS, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def refusing(rules: Sequence[str], command: Sequence[object]) -> list[str]:
    """Return `command`, run under these rules."""
    return [sys.executable, str(Path(__file__)), *rules, "--", *map(str, command)]


def is_possible() -> bool:
    """True if calls can be refused here."""
    has_it = (
        Path("/proc/self/status").exists() and "Seccomp:" in Path("/proc/self/status").read_text()
    )
    return has_it and platform.machine() in NUMBERS


def refuse(rules: Sequence[str]) -> None:
    """Hold this process, and all it starts, to the rules from now on."""
    numbers = NUMBERS[platform.machine()]
    program = b""
    for rule in rules:
        name, bits, error = re.fullmatch(r"(\w+)(?:&(\w+))?=(\w+)", rule).groups()  # type: ignore[union-attr]
        refused = _step(_RETURN, _ERRNO | getattr(errno, error))
        if bits is not None:
            flags = 16 + 8 * _FLAGS_ARGUMENT[name]
            refused = _step(_LOAD, flags) + _step(_IF_BITS, int(bits, 0), otherwise=1) + refused
        program += (
            _step(_LOAD, 0) + _step(_IF_EQUAL, numbers[name], otherwise=len(refused) // 8) + refused
        )
    program += _step(_RETURN, _ALLOW)
    libc = ctypes.CDLL(None, use_errno=True)
    held = ctypes.create_string_buffer(program)
    filter_ = _Program(len(program) // 8, ctypes.addressof(held))
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.byref(filter_), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))


def _step(code: int, value: int, *, otherwise: int = 0) -> bytes:
    return struct.pack("HBBI", code, 0, otherwise, value)


if __name__ == "__main__":
    at = sys.argv.index("--")
    refuse(sys.argv[1:at])
    os.execvp(sys.argv[at + 1], sys.argv[at + 1 :])
