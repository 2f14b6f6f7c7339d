"""Locks for file systems that keep none (some NFS, Lustre and FUSE mounts): a file that its holder keeps alive.

    with lockfile.held(path, wait=False, reason="No locks available"): ...

Beside `path` the file PATH.held names the holder, who counts up in it every few seconds. One that stands still for half
a minute counts as dead. So it is weaker than the kernel's locks in two ways, both of which are said where it is used: a
start after a crash may wait that long, and a process that itself stood still that long loses its place, and is ended
when it notices. Use `files.lock`, which comes here only where it must.
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
    """Contents of the file: `name` for people, `place` where a process id means something, `token` of this one hold."""

    name: str
    pid: int
    place: str
    token: str

    @property
    def is_dead(self) -> bool:
        """Certainly gone: only those who see its process id can say so at once."""
        return self.place == _place() and not processes.is_alive(self.pid)


@contextlib.contextmanager
def held(path: Path, *, wait: bool, reason: str) -> Iterator[None]:
    """Hold the lock `path`. With `wait` a holder is waited for; without, EnvironmentFault names it."""
    file = path.with_name(f"{path.name}.held")
    log.warning(
        "%s: this file system keeps no locks (%s); %s stands in for one. After a crash the next start may wait %d s "
        "for it, and what stands still for so long is taken for dead: do not stop (SIGSTOP, sleep) a machine in a run",
        path, reason, file.name, STALE_SECONDS,
    )  # fmt: skip
    mine = Holder(
        f"process {os.getpid()} on {socket.gethostname()}", os.getpid(), _place(), uuid.uuid4().hex
    )
    while not _create(file, mine):
        _wait_for_end(file, wait=wait)
    done = threading.Event()
    beating = threading.Thread(target=_beat, args=(file, mine, done), name="lock", daemon=True)
    beating.start()
    try:
        yield
    finally:
        if os.getpid() == mine.pid:  # not so in a forked child
            done.set()
            beating.join()
            if (seen := _read(file)) is not None and seen[0] == mine:
                file.unlink(missing_ok=True)


def _create(file: Path, mine: Holder) -> bool:
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
    # Flushed and closed: that is when NFS shows it to other machines.
    fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(
            fd, f"{mine.name}\n{mine.pid}\n{mine.place}\n{mine.token}\n{count:012d}\n".encode(), 0
        )
        os.fsync(fd)
    finally:
        os.close(fd)


def _read(file: Path) -> tuple[Holder | None, str] | None:
    """The holder and its count; no holder while it has only just created the file, and None without a file."""
    try:
        text = file.read_text(errors="replace")
    except FileNotFoundError:
        return None
    lines = text.splitlines()
    if len(lines) != 5 or not lines[1].isdecimal():
        return None, text
    return Holder(lines[0], int(lines[1]), lines[2], lines[3]), lines[4]


def _wait_for_end(file: Path, *, wait: bool) -> None:
    """Return when the lock may be free. Raises EnvironmentFault for a holder that lives, unless it is waited for."""
    first, since, is_told = _read(file), time.monotonic(), False
    while (seen := _read(file)) is not None:
        holder, name = seen[0], seen[0].name if seen[0] is not None else "another process"
        silent = time.monotonic() - since
        if seen != first:
            if not wait:
                raise EnvironmentFault(
                    f"{file} is held by {name}; wait until it ends, or stop it, and run the same command again"
                )
            first, since = seen, time.monotonic()
        elif ((holder and holder.is_dead) or silent > STALE_SECONDS) and _put_aside(
            file, seen, silent
        ):
            return
        if not is_told:
            is_told = True
            log.warning(
                "%s is held by %s; looking whether it lives takes up to %d s",
                file,
                name,
                STALE_SECONDS,
            )
        time.sleep(BEAT_SECONDS / 10)


def _put_aside(file: Path, seen: tuple[Holder | None, str], silent: float) -> bool:
    """Remove what a dead holder left, if it is still that. One process only has the right to, per hold; is it this?"""
    right = file.with_name(f"{file.name}.{seen[0].token if seen[0] is not None else 'unnamed'}")
    try:
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
    count, last = 0, time.monotonic()
    while not done.wait(BEAT_SECONDS):
        with contextlib.suppress(OSError):
            seen = _read(file)
            if seen is None or seen[0] not in (mine, None):
                break
            count += 1
            _write(file, mine, count)
            last = time.monotonic()
        if time.monotonic() - last > STALE_SECONDS - 2 * BEAT_SECONDS:
            break
    else:
        return
    # Others may write by now. Nobody can be asked to leave here in time, and two writers would spoil the work of both.
    with contextlib.suppress(OSError):
        os.write(
            2,
            f"kubetune: {file} is lost to another process, or cannot be written any more; ended\n".encode(),
        )
    os._exit(ENVIRONMENT)


def _place() -> str:
    """Within what process ids mean the same: a boot of a machine, and a process namespace of it."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return uuid.uuid4().hex  # like nobody else's
