"""The files and folders that code which rewards answers sees: all read-only but its folder, few devices, its own /proc.

Landlock (isolation.py) refuses writes, but knows neither modes, owners, times and attributes of files, nor what can only be
read: other processes in /proc, terminals in /dev. These calls change only the mount namespace of this process.
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from typing import Final

# mount(2)
_NOSUID: Final = 1 << 1
_NODEV: Final = 1 << 2
_NOEXEC: Final = 1 << 3
_BIND: Final = 1 << 12
_RECURSIVE: Final = 1 << 14
_PRIVATE: Final = 1 << 18
# mount_setattr(2), which has the same number on all machines
_MOUNT_SETATTR: Final = 442
_HERE: Final = -100
_AND_BELOW: Final = 0x8000
_READ_ONLY: Final = 1

_DEVICES: Final = ("null", "zero", "full", "random", "urandom")
_LINKS: Final = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}
_SHARED_MEMORY: Final = "/dev/shm"


def restrict(folder: str, shared_memory_bytes: int) -> None:
    """Show this process a machine that it cannot change. `folder` and a /dev/shm of its own stay writable.

    For process 1 of a new list of processes, in a mount namespace of its own. Raise OSError if the kernel refuses.
    """
    # No change reaches the machine.
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    # A mount of its own can be written to while those around it cannot.
    _mount(folder, folder, None, _BIND)
    # The current folder would still be the one below that mount.
    os.chdir(folder)
    _replace_devices(shared_memory_bytes)
    _replace_processes()
    _set_attributes("/", _AND_BELOW, set_bits=_READ_ONLY)
    for path in (folder, _SHARED_MEMORY):
        _set_attributes(path, 0, cleared_bits=_READ_ONLY)


def _replace_devices(shared_memory_bytes: int) -> None:
    """Replace /dev by one with few devices, no terminal, and a /dev/shm that nobody else has."""
    devices = {}
    for name in _DEVICES:
        devices[name] = os.open(f"/dev/{name}", os.O_PATH | os.O_CLOEXEC)
    _mount("tmpfs", "/dev", "tmpfs", _NOSUID | _NOEXEC, "mode=755,size=64k")
    for name, device in devices.items():
        Path("/dev", name).touch()
        _mount(f"/proc/self/fd/{device}", f"/dev/{name}", None, _BIND)
        os.close(device)
    for name, target in _LINKS.items():
        os.symlink(target, f"/dev/{name}")
    os.mkdir(_SHARED_MEMORY)
    size = f"mode=1777,size={shared_memory_bytes}"
    _mount("tmpfs", _SHARED_MEMORY, "tmpfs", _NOSUID | _NODEV, size)


def _replace_processes() -> None:
    """Replace /proc by one that shows only the processes of this list."""
    flags = _NOSUID | _NODEV | _NOEXEC
    try:
        _mount("proc", "/proc", "proc", flags)
    except PermissionError:
        # In containers parts of /proc are covered, and then the kernel gives no second one. An empty one hides as much.
        _mount("tmpfs", "/proc", "tmpfs", flags, "mode=555,size=4k")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.mount(
        source.encode() if source else None,
        target.encode(),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        data.encode() or None,
    )
    if done != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def _set_attributes(path: str, flags: int, *, set_bits: int = 0, cleared_bits: int = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    # Bits to set and to clear, the propagation to keep, and no user namespace to translate ids by.
    attributes = struct.pack("=4Q", set_bits, cleared_bits, 0, 0)
    done = libc.syscall(
        _MOUNT_SETATTR, _HERE, path.encode(), flags, attributes, ctypes.c_size_t(len(attributes))
    )
    if done != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
