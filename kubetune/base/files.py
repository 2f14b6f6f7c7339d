"""Files that appear whole or not at all: atomic writes, checksums, locks, paths that stay inside.

What somebody else may have made is opened by `open_inside`: a run directory or a model that was received may hold a
pipe, a device, a socket or a link that leads out of it. Reading a pipe waits for ever, `/dev/zero` never ends, and a
link shows what its sender should not see.

Knows nothing of runs or checkpoints, and when imported takes in only the standard library.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import resource
import shutil
import socket
import stat
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

# `extras` is imported here, not where it is used: it explains errors, also that no more files can be opened.
from kubetune import extras
from kubetune.base import fault_injection, lockfile, reminders
from kubetune.errors import ConfigError, EnvironmentFault, KubetuneError, OutOfMemory, causes

if TYPE_CHECKING:
    import psutil

log = logging.getLogger(__name__)

StrPath = str | os.PathLike[str]

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_NOT_PERMITTED = (errno.EACCES, errno.EPERM, errno.EROFS)
_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
# A folder where a file is expected, or the other way round.
_OF_OTHER_SORT = (errno.EISDIR, errno.ENOTDIR)
_OF_THE_SYSTEM = (
    *DISK_FULL, *_NOT_PERMITTED, *_OF_OTHER_SORT, errno.EFBIG, errno.EIO, errno.ESTALE, errno.ELOOP, errno.ENAMETOOLONG
)  # fmt: skip

_NO_INODES = "delete some files, or choose a disk that can hold more of them"
_YOUNG_SECONDS = 1.0
_LARGER_FILES = "allow larger files (ulimit -f), or choose a disk that takes them"


_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_OF_THIS_PROCESS = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
_STREAMS = ("/dev/stdout", "/dev/stderr", *_OF_THIS_PROCESS)
_SNAPSHOTS = "snapshots"
_REPOSITORIES = ("models--", "datasets--")
"""Beginnings of the names of repositories in the hub's cache."""
_MOST_ENTRIES = 200_000
"""Entries of one folder that are looked at; no run directory and no model has as many."""


class IrregularFileError(EnvironmentFault, OSError):
    """A name that stands for no regular file inside its folder. Its text says which name, and what it is."""

    def __init__(self, path: str | os.PathLike[str], what: str, number: int = errno.EINVAL) -> None:
        super().__init__(number, what, os.fspath(path))

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"


def temporary_sibling(path: StrPath) -> Path:
    """A hidden name beside `path`, on the same file system, that no other process uses."""
    path = Path(path)
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")


def fsync_folder(path: StrPath) -> None:
    """Make the names in a folder durable: without it a rename can be lost in a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def explained_writes(path: StrPath) -> Iterator[None]:
    """Turn an OSError while writing under `path` into an EnvironmentFault that says what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in DISK_FULL:
            reason += f" {_room(path)} and run the same command again"
        elif error.errno in _NOT_PERMITTED:
            reason += "; choose a folder you may write to"
        elif error.errno == errno.EFBIG:
            reason += f"; {_LARGER_FILES}"
        raise EnvironmentFault(
            f"cannot write {error.filename2 or error.filename or path}: {reason}"
        ) from error


def fault_of(error: BaseException) -> KubetuneError | None:
    """The system's refusal in words, where nobody had more to say about it; None for what may be our own mistake.

    A library that is not installed is one, where an extra brings it.

    A name that is only looked up can be refused too, as in a folder that this user may not enter. What ran short may
    show in what was going on when something else failed for it.
    """
    if lack := extras.missing_extra(error):
        return lack
    for cause in causes(error, hidden=True):
        if shortage := _shortage_of(cause):
            return shortage
    if library := _library_loaded(error):
        said = next(filter(None, str(error).splitlines()), "it says no more")
        advice = "correct the environment variable that it names, or else install its package again"
        if sys.flags.optimize > 1:
            advice = "unset PYTHONOPTIMIZE, by which libraries lose the docstrings that they read"
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            # Not every library says that memory ran out: some raise SystemError, or an error of their own.
            advice = f"ulimit -v allows {limit:,} bytes, which may be too few: allow more; {advice}"
        return EnvironmentFault(
            f"{library} cannot be loaded: {type(error).__name__}: {said}; {advice}"
        )
    if trouble := _folder_trouble(error):
        return EnvironmentFault(
            f"the folder that this was started in {trouble}; go to another one (cd)"
        )
    if not isinstance(error, OSError) or error.errno not in _OF_THE_SYSTEM:
        return None
    name = (
        error.filename2 or error.filename
    )  # of two names the second is the one that was to be made
    where = f"{name}: " if name is not None else ""
    advice = "see that it can be read and written, or name another"
    if error.errno in (*DISK_FULL, errno.EFBIG):
        advice = _LARGER_FILES
        if error.errno in DISK_FULL:
            advice = _NO_INODES if name is not None and _lacks_inodes(name) else "free some space"
    return EnvironmentFault(f"{where}{error.strerror}; {advice}, and run the same command again")


def _library_loaded(error: BaseException) -> str | None:
    """The package of others that was being imported when an error came up in its own code."""
    frames = (
        frame
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name == "<module>"
    )
    packages = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames]
    return packages[-1] if packages and packages[-1] not in ("kubetune", "__main__") else None


def _folder_trouble(error: BaseException) -> str:
    """The working folder's part in an error: gone, or of a name that libraries cannot open; empty where it has none."""
    try:
        os.getcwd().encode()
    except FileNotFoundError:
        return "is gone" if isinstance(error, FileNotFoundError) else ""
    except UnicodeEncodeError:
        unreadable = isinstance(error, UnicodeEncodeError) or "not valid UTF-8" in str(
            error
        )  # safetensors
        return "has a name that is not UTF-8" if unreadable else ""
    return ""


def known(error: BaseException) -> KubetuneError | None:
    """An error as users are told of it: one of ours, or the system's refusal; None for what may be our own mistake."""
    return error if isinstance(error, KubetuneError) else fault_of(error)


_SHORT_OF_PROCESSES = ("can't start new thread", "Resource temporarily unavailable")
_SHORT_OF_MEMORY = (
    "can't allocate memory",
    "Cannot allocate memory",
    "failed to map segment",
    "std::bad_alloc",
)


def _shortage_of(error: BaseException) -> EnvironmentFault | None:
    """Processes, memory or open files that a limit did not allow, as Python, the loader and torch say it."""
    number, text = error.errno if isinstance(error, OSError) else None, str(error)
    if number in (errno.EMFILE, errno.ENFILE):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return EnvironmentFault(
            f"{error}: this process may have {most:,} files open; allow more (ulimit -n)"
        )
    if (
        isinstance(error, MemoryError)
        or number == errno.ENOMEM
        or any(said in text for said in _SHORT_OF_MEMORY)
    ):
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        allowed = "" if limit == resource.RLIM_INFINITY else f" ulimit -v allows {limit:,} bytes."
        said = (text.splitlines() or ["memory ran out"])[0]
        return OutOfMemory(
            f"out of memory: {said}.{allowed} Allow more, or take smaller batches or a smaller model"
        )
    if number == errno.EAGAIN or (
        isinstance(error, RuntimeError) and any(said in text for said in _SHORT_OF_PROCESSES)
    ):
        most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        allowed = "no limit" if most == resource.RLIM_INFINITY else f"{most:,}"
        # Of a thread Python does not tell the reason.
        hidden = "; or memory is short" if isinstance(error, RuntimeError) else ""
        return EnvironmentFault(
            f"no more processes or threads can be started ({text}); allow more: ulimit -u gives {allowed}, and the "
            f"container or the service may have a limit of its own (pids.max){hidden}"
        )
    return None


def user_cache(environ: Mapping[str, str]) -> Path:
    """Folder of this user's caches."""
    return Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


def free_bytes(path: StrPath) -> int:
    """Free bytes on the file system that holds `path`, or would hold it once it exists."""
    return shutil.disk_usage(_existing(path)).free


def _existing(path: StrPath) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    existing = Path(path).absolute()
    while not existing.exists():
        existing = existing.parent
    return existing


def _room(path: StrPath) -> str:
    """Return what a full disk has left, and what to do, to stand before "and run the same command again"."""
    free = f"{free_bytes(path):,} bytes free"
    if _lacks_inodes(path):
        return f"({free}, but no inodes: `df -i` shows them); {_NO_INODES}"
    return f"({free}); free some space"


def _lacks_inodes(path: StrPath) -> bool:
    """Return True if a file system can hold no more files, however small they are.

    Some file systems make inodes as they need them, and say that they have none at all.
    """
    try:
        facts = os.statvfs(_existing(path))
    except OSError:
        return False
    return facts.f_files > 0 and facts.f_favail == 0


def is_abandoned(path: Path) -> bool:
    """Return True if a file that was being written has lost its writer, who holds a lock on it as long as it lives."""
    try:
        # Between the making of a file and its lock nobody holds it.
        if time.time() - path.stat().st_mtime < _YOUNG_SECONDS:
            return False
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def written_whole(
    path: StrPath,
    within: Path | None = None,
    explained: Callable[[Path], contextlib.AbstractContextManager[None]] = explained_writes,
) -> Iterator[BinaryIO]:
    """A file to write to bit by bit, that gets its name when the block ends well and vanishes when it does not.

    Readers, and a crash at any moment, see the old content or the new, never a part. Creates missing parent folders,
    but not `within`: a run directory that was deleted must not come to be anew. Raises EnvironmentFault when the disk
    is full, the folder not writable, `within` not there, or the name a device's, a pipe's or a stream's.
    """
    path = Path(path)
    temporary = temporary_sibling(path)
    with explained(path):
        _require_replaceable(path)
        if path.parent != within:
            path.parent.mkdir(parents=within is None, exist_ok=True)
        try:
            with open(temporary, "xb") as file:
                with contextlib.suppress(OSError):  # a file system may keep no locks
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield file
                file.flush()
                fault_injection.reach(f"write {path.name}")
                os.fsync(file.fileno())
                os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        fsync_folder(path.parent)


def _require_replaceable(path: Path) -> None:
    """Raise IrregularFileError for what a file must not take the place of, such as /dev/null."""
    if os.fspath(path).startswith(_STREAMS):
        raise IrregularFileError(path, "is a stream of this process; expected the name of a file")
    try:
        mode = path.stat().st_mode
    except OSError:  # nothing there, or a link to nothing
        return
    for is_kind, name in _KINDS:
        if is_kind(mode):
            raise IrregularFileError(path, f"is {name}; expected the name of a file")


def require_not_read(output: StrPath, source: StrPath) -> None:
    """Raise ConfigError where a result would take the place of the file that it is made from."""
    with contextlib.suppress(OSError):  # an address, or not there yet
        if os.path.samefile(output, source):
            raise ConfigError(
                f"{output} is the file that is read, and would be overwritten; name another for what is written. "
                "Nothing was written."
            )


def write_atomic(path: StrPath, content: bytes | str, within: Path | None = None) -> None:
    """Write a file in one go, as `written_whole` does."""
    with written_whole(path, within) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a file that the user named: links are followed, but what is no regular file is refused at once.

    The shell's `<(command)` and `/dev/stdin` are pipes that the user has made for this process, and are read to their
    end. Raises IrregularFileError, or OSError as `open` does.
    """
    if os.fspath(path).startswith(_OF_THIS_PROCESS):
        return open(path, "rb")
    real = os.path.realpath(path)
    return _opened(Path(path), real)


def open_inside(
    path: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None
) -> BufferedReader:
    """Open a file of a folder that somebody else may have made; `folder` is that of the file where none is named.

    Raises IrregularFileError for a pipe, a socket, a device, and a link that leads out of `folder`; else OSError as
    `open` does.
    """
    path = Path(path)
    is_in_subfolder = folder is not None and Path(folder) != path.parent
    if is_in_subfolder or stat.S_ISLNK(os.lstat(path).st_mode):
        return _opened(path, require_inside(path, folder))
    return _opened(path, os.fspath(path))


def read_inside(
    path: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None
) -> bytes:
    """Return the bytes of a file, opened as `open_inside` does."""
    with open_inside(path, folder) as file:
        return file.read()


def is_file_inside(
    path: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None
) -> bool:
    """True if `open_inside` would open the file."""
    try:
        open_inside(path, folder).close()
    except OSError:
        return False
    return True


def require_inside(
    path: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None
) -> str:
    """Return the path without links. Raises IrregularFileError where that is outside of `folder`."""
    folder = Path(path).parent if folder is None else Path(folder)
    real = os.path.realpath(path)
    if not any(os.path.commonpath([root, real]) == root for root in _roots(folder)):
        raise IrregularFileError(
            path,
            f"is a link that leads out of {folder}; put what it should hold there itself",
            errno.ELOOP,
        )
    return real


def require_plain(folder: str | os.PathLike[str], but: tuple[str, ...] = ()) -> None:
    """Raise IrregularFileError for the first thing below a folder that is no file or folder inside it.

    For what hands a whole folder to other libraries, which open what they like. `but`: names of folders at its top that
    nothing here reads.
    """
    folder = Path(folder)
    count = 0
    for place, folders, names in os.walk(folder):
        if Path(place) == folder:
            folders[:] = [name for name in folders if name not in but]
        for name in sorted((*names, *folders)):
            require_plain_entry(os.path.join(place, name), folder)
        count += len(names)
        if count > _MOST_ENTRIES:
            raise IrregularFileError(folder, f"holds more than {_MOST_ENTRIES:,} files")


def require_plain_entry(path: StrPath, folder: StrPath) -> None:
    """Raise IrregularFileError for a name below a folder that stands for no file or folder inside it."""
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        real = require_inside(path, folder)
        if not os.path.exists(real):
            return  # nothing can be read there; what is written replaces the link
        mode = os.stat(real).st_mode
    if not stat.S_ISDIR(mode):
        _require_regular(Path(path), mode)


def _roots(folder: Path) -> list[str]:
    """Return the folders that links of a folder may lead to: itself, and those of the hub's cache around a snapshot."""
    real = Path(os.path.realpath(folder))
    roots = [os.fspath(real)]
    if real.parent.name == _SNAPSHOTS and real.parents[1].name.startswith(_REPOSITORIES):
        roots.append(os.fspath(real.parents[1]))
    return roots


def _opened(path: Path, real: str) -> BufferedReader:
    _require_regular(path, os.stat(real).st_mode)
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
    number = os.open(real, flags)
    try:
        _require_regular(path, os.fstat(number).st_mode)  # it may have been replaced meanwhile
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


def _require_regular(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    for is_kind, name in _KINDS:
        if is_kind(mode):
            raise IrregularFileError(path, f"is {name}; expected a file")


def read_object(path: StrPath, folder: StrPath | None = None) -> dict[str, Any]:
    """The JSON object in a file that kubetune wrote. Raises EnvironmentFault for one that is damaged, or no file.

    `folder`: that which it must lie in, its own where left out.
    """
    try:
        found = json.loads(read_inside(path, folder))
        if isinstance(found, dict):
            return found
        reason = f"it holds a {type(found).__name__}"
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
    raise EnvironmentFault(
        f"{path} is damaged ({reason}); expected a JSON object that kubetune wrote. Put it back from a copy, such as a "
        "mirror's"
    )


def sha256_file(path: StrPath) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def lock(path: StrPath, *, wait: bool) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, which is created and left behind.

    The kernel frees the lock when its holder dies, so a stale lock cannot exist; forked children do not share it.
    With `wait` a held lock is waited for; without, EnvironmentFault names the holder. Where the file system keeps no
    locks, a file that its holder keeps alive stands in for one.
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
        if fd in _lock_fds:  # not so in a forked child
            _lock_fds.remove(fd)
            os.close(fd)


def _locked(fd: int, path: Path, wait: bool) -> contextlib.AbstractContextManager[None]:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
        if not wait:
            raise EnvironmentFault(
                f"{path} is locked by {holder}; wait until it ends, or stop it, and run the same command again"
            ) from None
        log.info("waiting for %s, which holds %s", holder, path)
        with reminders.reminding(
            lambda taken: log.info("for %s, %s has held %s", taken, holder, path)
        ):
            fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        return lockfile.held(path, wait=wait, reason=error.strerror or str(error))
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return contextlib.nullcontext()


def locker(path: Path) -> int | None:
    """Process id that the lock `path` names, of this machine; its process may have ended, and the id be another's."""
    try:
        said = re.match(r"process (\d+) on (\S+)", read_inside(path).decode(errors="replace"))
    except (FileNotFoundError, IrregularFileError):
        return None
    return int(said[1]) if said is not None and said[2] == socket.gethostname() else None


def holder(path: Path) -> psutil.Process | None:
    """Process of this machine that the lock `path` names and that has it open; None where there is none such.

    Others may have its id by now, or in another container, and none of them may be asked to end.
    """
    import psutil

    number = locker(path)
    with contextlib.suppress(psutil.Error, OSError):
        process = None if number is None else psutil.Process(number)
        if process is not None and any(
            os.path.samefile(one.path, path) for one in process.open_files()
        ):
            return process
    return None


_lock_fds: set[int] = set()


def _drop_locks() -> None:
    while _lock_fds:
        os.close(_lock_fds.pop())


os.register_at_fork(after_in_child=_drop_locks)


def join_inside(folder: StrPath, relative: str) -> Path:
    """`folder / relative`, resolved, for a relative path that came from data.

    Raises ValueError, saying why, when it is absolute, has a NUL, or leads outside the folder (also by a symlink).
    """
    if "\0" in relative:
        raise ValueError(f"path {relative!r} holds a NUL byte")
    if os.path.isabs(relative) or "://" in relative:
        raise ValueError(f"path {relative!r} must be relative to {folder}")
    root = Path(folder).resolve()
    joined = (root / relative).resolve()
    if not joined.is_relative_to(root):
        raise ValueError(f"path {relative!r} leads outside {folder}")
    return joined
