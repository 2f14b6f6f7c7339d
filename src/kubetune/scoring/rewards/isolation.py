"""Bounds of the reward process: what code that rewards answers cannot take, reach or leave behind.

It has an empty environment, a temporary folder, no more memory and larger files than are allowed, and, where the
kernel lets an ordinary process have namespaces of its own, no network and no process that outlives it.
"""

from __future__ import annotations

import ctypes
import os
import resource
from typing import Final

_NEW_USER: Final = 0x10000000
_NEW_PROCESSES: Final = 0x20000000
_NEW_NETWORK: Final = 0x40000000

LARGEST_FILE_BYTES: Final = 256 * 2**20
MOST_OPEN_FILES: Final = 256


def limit(memory_bytes: int) -> None:
    """Bound what this process and its children may take each."""
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
