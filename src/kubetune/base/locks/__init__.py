"""Locks on files, which the kernel frees when their holder dies. Read this file first, then `lockfile`.

Not for what is locked, nor for how it is written (files).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kubetune.base import reminders
from kubetune.base.locks import lockfile
from kubetune.errors import EnvironmentFault

if TYPE_CHECKING:
    import psutil
from kubetune.base.files import IrregularFileError, StrPath, explained_writes, read_inside

log = logging.getLogger(__name__)

_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextlib.contextmanager
def lock(path: StrPath, *, wait: bool) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, which is created and stays afterwards.

    The kernel frees the lock when its holder dies, so no lock is ever stale. Forked children do not share it. If the
    lock is held: with `wait` this waits, without it EnvironmentFault names the holder. On a file system without locks
    `lockfile` stands in.
    """
    with explained_writes(path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    _lock_fds.add(fd)
    try:
        with explained_writes(path):
            locked = _locked(fd, Path(path), wait)
        with locked:
            yield
    finally:
        if fd in _lock_fds:  # a forked child has closed it already
            _lock_fds.remove(fd)
            os.close(fd)


def _locked(fd: int, path: Path, wait: bool) -> contextlib.AbstractContextManager[None]:
    """Take the lock, and write into the file who holds it. Return what to hold during the block."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
        if not wait:
            raise EnvironmentFault(
                f"{path} is locked by {holder}; wait until it ends, or stop it, and run the same command again"
            ) from None

        # What the user would otherwise take for a hang: a line now, and others from time to time.
        log.info("waiting for %s, which holds %s", holder, path)
        with reminders.reminding(
            lambda taken: log.info("for %s, %s has held %s", taken, holder, path)
        ):
            fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        return lockfile.held(path, wait=wait, reason=error.strerror or str(error))

    # Whoever finds the file locked reads this.
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return contextlib.nullcontext()


def locker(path: Path) -> int | None:
    """Return the process id that a lock names, if it is of this machine. By now another process may have that id."""
    try:
        text = read_inside(path).decode(errors="replace")
    except (FileNotFoundError, IrregularFileError):
        return None
    # On a shared disk, another machine's process may have the number of one here.
    match = re.match(r"process (\d+) on (\S+)", text)
    if match is None or match[2] != socket.gethostname():
        return None
    return int(match[1])


def holder(path: Path) -> psutil.Process | None:
    """Return the process of this machine that a lock names, if it has the lock's file open.

    Its id may belong to another process by now, here or in another container, which must not be asked to end.
    """
    import psutil

    number = locker(path)
    if number is None:
        return None
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(number)
        if any(os.path.samefile(file.path, path) for file in process.open_files()):
            return process
    return None


_lock_fds: set[int] = set()


def _drop_locks() -> None:
    # In a forked child: a lock lasts until the last copy of its file descriptor is closed.
    while _lock_fds:
        os.close(_lock_fds.pop())


os.register_at_fork(after_in_child=_drop_locks)
