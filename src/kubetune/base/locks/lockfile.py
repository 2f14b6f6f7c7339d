"""Locks for file systems that keep none (some NFS, Lustre and FUSE mounts): a file that its holder keeps alive.

    with lockfile.held(path, wait=False, reason="No locks available"): ...

Beside `path` the file PATH.held names the holder, which counts up in it every few seconds:

    process 4711 on gpu-1                                  for people
    4711                                                   process id
    3f1c… pid:[4026531836]                                 where that id means something
    9b1d…                                                  token of this hold
    000000000042                                           the count

A holder whose count stands still for half a minute counts as dead. So this lock is weaker than the kernel's in two ways,
and a warning says so: a start after a crash may wait that long, and a process that was stopped for that long loses the
lock and ends itself when it notices. Use `locks.lock`, which comes here only if it must.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kubetune.base import processes
from kubetune.errors import ENVIRONMENT, EnvironmentFault

log = logging.getLogger(__name__)

BEAT_SECONDS = 3.0
STALE_SECONDS = 30.0


@dataclass(frozen=True)
class Holder:
    """Who holds the lock, as the file says."""

    name: str  # for messages: process 4711 on gpu-1
    pid: int
    place: str  # boot and process namespace, within which `pid` means something
    token: str  # random, of this one hold

    @property
    def is_dead(self) -> bool:
        """True if the holder has certainly ended. Only a process in the same place can tell."""
        return self.place == _place() and not processes.is_alive(self.pid)


@contextlib.contextmanager
def held(path: Path, *, wait: bool, reason: str) -> Iterator[None]:
    """Hold the lock `path`. If another holds it: wait with `wait`, else raise EnvironmentFault that names the holder."""
    file = path.with_name(f"{path.name}.held")
    log.warning(
        "%s: this file system keeps no locks (%s); %s stands in for one. After a crash the next start may wait %d s "
        "for it, and what stands still for so long is taken for dead: do not stop (SIGSTOP, sleep) a machine in a run",
        path, reason, file.name, STALE_SECONDS,
    )  # fmt: skip
    mine = Holder(
        f"process {os.getpid()} on {socket.gethostname()}", os.getpid(), _place(), uuid.uuid4().hex
    )
    # Whoever makes the file holds the lock.
    while not _create(file, mine):
        _wait_for_end(file, wait=wait)
    # A thread counts up while the block runs.
    done = threading.Event()
    beating = threading.Thread(target=_beat, args=(file, mine, done), name="lock", daemon=True)
    beating.start()
    try:
        yield
    finally:
        if os.getpid() == mine.pid:  # a forked child has no part in the lock
            done.set()
            beating.join()
            content = _read(file)
            if content is not None and content[0] == mine:
                file.unlink(missing_ok=True)


def _create(file: Path, mine: Holder) -> bool:
    """Make the file. Return False if another process has made it."""
    try:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        return False
    os.close(fd)
    try:
        _write(file, mine, 0)
    except OSError:
        file.unlink(missing_ok=True)
        raise
    return True


def _write(file: Path, mine: Holder, count: int) -> None:
    # NFS shows a file's new content to other machines when it is flushed and closed.
    text = f"{mine.name}\n{mine.pid}\n{mine.place}\n{mine.token}\n{count:012d}\n"
    fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(fd, text.encode(), 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def _read(file: Path) -> tuple[Holder | None, str] | None:
    """Return the holder and its count. None if there is no file.

    The holder is None, and the count is all of the text, if the holder has made the file but not written it yet.
    """
    try:
        text = file.read_text(errors="replace")
    except FileNotFoundError:
        return None
    lines = text.splitlines()
    if len(lines) != 5 or not lines[1].isdecimal():
        return None, text
    return Holder(lines[0], int(lines[1]), lines[2], lines[3]), lines[4]


def _wait_for_end(file: Path, *, wait: bool) -> None:
    """Return when the lock may be free. Raise EnvironmentFault if the holder lives, unless `wait`."""
    content = _read(file)
    since = time.monotonic()  # when the content last changed
    has_warned = False
    while (new_content := _read(file)) is not None:
        holder = new_content[0]
        name = holder.name if holder is not None else "another process"
        silent = time.monotonic() - since
        if new_content != content:
            # The count has moved, or another process has taken the lock: somebody lives.
            if not wait:
                raise EnvironmentFault(
                    f"{file} is held by {name}; wait until it ends, or stop it, and run the same command again"
                )
            content = new_content
            since = time.monotonic()
        else:
            is_dead = silent > STALE_SECONDS or (holder is not None and holder.is_dead)
            if is_dead and _put_aside(file, new_content, silent):
                return
        if not has_warned:
            has_warned = True
            log.warning(
                "%s is held by %s; looking whether it lives takes up to %d s",
                file,
                name,
                STALE_SECONDS,
            )
        time.sleep(BEAT_SECONDS / 10)


def _put_aside(file: Path, seen: tuple[Holder | None, str], silent: float) -> bool:
    """Remove what a dead holder left, if the file still holds it. Return False if another process is doing so.

    Two processes could both see the dead holder, one remove its file and make a new one, and the other remove that. So
    only the process that makes the file `right` may remove anything of this hold.
    """
    token = seen[0].token if seen[0] is not None else "unnamed"
    right = file.with_name(f"{file.name}.{token}")
    try:
        # Only one process can make this file.
        os.close(os.open(right, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    except FileExistsError:
        if silent > 2 * STALE_SECONDS:
            raise EnvironmentFault(
                f"{file} was left by a process that died, and {right} by another that died when it cleared up; look "
                "whether no run uses the folder, and remove both"
            ) from None
        return False
    try:
        if _read(file) == seen:
            file.unlink(missing_ok=True)
    finally:
        right.unlink(missing_ok=True)
    return True


def _beat(file: Path, mine: Holder, done: threading.Event) -> None:
    """Count up in the file until `done`. End the process if the lock is lost."""
    count = 0
    last = time.monotonic()
    while not done.wait(BEAT_SECONDS):
        with contextlib.suppress(OSError):
            seen = _read(file)
            if seen is None or seen[0] not in (mine, None):
                break
            count += 1
            _write(file, mine, count)
            last = time.monotonic()
        # Two beats before others take this process for dead.
        if time.monotonic() - last > STALE_SECONDS - 2 * BEAT_SECONDS:
            break
    else:
        return
    # Another process may write by now, and two writers would spoil the work of both. This thread cannot stop the main
    # thread in time, so it ends the process.
    with contextlib.suppress(OSError):
        os.write(
            2,
            f"kubetune: {file} is lost to another process, or cannot be written any more; ended\n".encode(),
        )
    os._exit(ENVIRONMENT)


def _place() -> str:
    """Return where process ids mean the same: a boot of a machine, and a process namespace in it."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return uuid.uuid4().hex  # unknown: equal to no other place
