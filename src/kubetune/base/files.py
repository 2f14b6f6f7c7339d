"""Files that appear whole or not at all: atomic writes, checksums, and paths that stay inside a folder.

Files that somebody else may have made are opened by `open_inside`. A run directory or model that a user received may
hold a pipe (reading it waits for ever), a device (`/dev/zero` never ends), or a link that leads out of the folder (it
shows its sender's choice of the user's files).

Nothing here knows runs or checkpoints. Importing this module imports only the standard library.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from kubetune.base import fault_injection
from kubetune.errors import ConfigError, EnvironmentFault

StrPath = str | os.PathLike[str]

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
NOT_PERMITTED = (errno.EACCES, errno.EPERM, errno.EROFS)

NO_INODES = "delete some files, or choose a disk that can hold more of them"
# A file younger than this may not have its writer's lock yet.
_YOUNG_SECONDS = 1.0
LARGER_FILES = "allow larger files (ulimit -f), or choose a disk that takes them"


_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_OF_THIS_PROCESS = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
_STREAMS = ("/dev/stdout", "/dev/stderr", *_OF_THIS_PROCESS)
# Folders of the hub's cache: models--OWNER--NAME/snapshots/COMMIT/ holds links to models--OWNER--NAME/blobs/.
_SNAPSHOTS = "snapshots"
_REPOSITORIES = ("models--", "datasets--")
# No run directory and no model has as many files.
_MOST_ENTRIES = 200_000


class IrregularFileError(EnvironmentFault, OSError):
    """The path is no regular file inside its folder. The message says which path, and what it is instead."""

    def __init__(self, path: str | os.PathLike[str], what: str, number: int = errno.EINVAL) -> None:
        super().__init__(number, what, os.fspath(path))

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"


def leave_note(path: Path, text: str) -> None:
    """Write a file that is of no use later, so it need not be durable, nor fit on the disk."""
    temporary = temporary_sibling(path)
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def temporary_sibling(path: StrPath) -> Path:
    """Return a hidden name beside `path`, so on the same file system, that no other process uses."""
    path = Path(path)
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")


def is_temporary(name: str) -> bool:
    """True for the name of a copy that was not finished, as `temporary_sibling` makes them."""
    return name.startswith(".") and name.endswith(".tmp")


def fsync_folder(path: StrPath) -> None:
    """Make the names in a folder durable. Without it a power cut can undo a rename."""
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
        # numpy's `tofile` says only "98304 requested and 81792 written"; a full disk is what cuts a write short.
        is_short = error.errno is None and " requested and " in reason
        if error.errno in DISK_FULL or is_short:
            reason += f" {_room(path)} and run the same command again"
        elif error.errno in NOT_PERMITTED:
            reason += "; choose a folder you may write to"
        elif error.errno == errno.EFBIG:
            reason += f"; {LARGER_FILES}"
        raise EnvironmentFault(
            f"cannot write {error.filename2 or error.filename or path}: {reason}"
        ) from error


def user_cache(environ: Mapping[str, str]) -> Path:
    """Return the folder of this user's caches."""
    return Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


def free_bytes(path: StrPath) -> int:
    """Return the free bytes of the file system that holds `path`, or will hold it."""
    return shutil.disk_usage(_existing(path)).free


def _existing(path: StrPath) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    existing = Path(path).absolute()
    while not existing.exists():
        existing = existing.parent
    return existing


def _room(path: StrPath) -> str:
    """Return what a full disk has left, and what to do. The caller adds "and run the same command again"."""
    free = f"{free_bytes(path):,} bytes free"
    if lacks_inodes(path):
        return f"({free}, but no inodes: `df -i` shows them); {NO_INODES}"
    return f"({free}); free some space"


def lacks_inodes(path: StrPath) -> bool:
    """True if a file system can hold no more files, however small they are."""
    try:
        facts = os.statvfs(_existing(path))
    except OSError:
        return False
    # A file system that makes inodes as it needs them reports 0 of 0.
    return facts.f_files > 0 and facts.f_favail == 0


def is_abandoned(path: Path) -> bool:
    """True if the process that was writing a file has died. A writer holds a lock on its file while it lives."""
    try:
        # Between making the file and locking it, a writer holds no lock.
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
    """Yield a file that gets its name when the block ends, and vanishes if the block raises.

    Readers see the old content or the new, never a part, also after a crash at any moment. Missing parent folders are
    made, except for `within`: a run directory that a user has deleted must not come back. Raise EnvironmentFault if
    the disk is full, the folder is not writable, `within` is missing, or the path is a device, a pipe or a stream.
    """
    path = Path(path)
    temporary = temporary_sibling(path)
    with explained(path):
        _require_replaceable(path)
        if path.parent != within:
            path.parent.mkdir(parents=within is None, exist_ok=True)
        try:
            with open(temporary, "xb") as file:
                # The lock tells `is_abandoned` that this process lives. Some file systems keep no locks.
                with contextlib.suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield file

                # The content must be on the disk before the name: else a power cut could leave an empty file.
                file.flush()
                fault_injection.reach(f"write {path.name}")
                os.fsync(file.fileno())
                os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        # And the name itself.
        fsync_folder(path.parent)


def _require_replaceable(path: Path) -> None:
    """Raise IrregularFileError for a path that a file must not replace, such as /dev/null."""
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
    """Raise ConfigError if a result would overwrite the file that it is made from."""
    with contextlib.suppress(OSError):  # an address, or not there yet
        if os.path.samefile(output, source):
            raise ConfigError(
                f"{output} is the file that is read, and would be overwritten; name another for what is written. "
                "Nothing was written."
            )


def write_atomic(path: StrPath, content: bytes | str, within: Path | None = None) -> None:
    """Write a file in one go, as `written_whole` does."""
    if isinstance(content, str):
        content = content.encode()
    with written_whole(path, within) as file:
        file.write(content)


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a file that the user named. Links are followed; pipes, devices and sockets are refused at once.

    The shell's `<(command)` and `/dev/stdin` are pipes that the user has made for this process, so they are read.
    Raise IrregularFileError, or OSError as `open` does.
    """
    if os.fspath(path).startswith(_OF_THIS_PROCESS):
        return open(path, "rb")
    real = os.path.realpath(path)
    return _opened(Path(path), real)


def open_inside(
    path: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None
) -> BufferedReader:
    """Open a file in a folder that somebody else may have made. `folder` defaults to the file's own folder.

    Raise IrregularFileError for a pipe, a socket, a device, and a link that leads out of `folder`. Raise OSError as
    `open` does.
    """
    # A plain file right in its folder needs no look at the links above it, which is the usual case.
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
    """Return the path with links resolved. Raise IrregularFileError if that is outside of `folder`."""
    if folder is None:
        folder = Path(path).parent
    folder = Path(folder)

    # By whole parts: /runs/ab is not inside /runs/a.
    real = os.path.realpath(path)
    for root in _roots(folder):
        if os.path.commonpath([root, real]) == root:
            return real
    raise IrregularFileError(
        path,
        f"is a link that leads out of {folder}; put what it should hold there itself",
        errno.ELOOP,
    )


def require_plain(folder: str | os.PathLike[str], but: tuple[str, ...] = ()) -> None:
    """Raise IrregularFileError for the first entry below a folder that is no file or folder inside it.

    Call this before a whole folder goes to a library, which opens any file in it. `but`: names of folders at the top
    that nobody reads.
    """
    folder = Path(folder)
    count = 0
    for place, folders, names in os.walk(folder):
        # os.walk goes into the folders that are left in its list.
        if Path(place) == folder:
            folders[:] = [name for name in folders if name not in but]
        for name in sorted((*names, *folders)):
            require_plain_entry(os.path.join(place, name), folder)
        count += len(names)
        if count > _MOST_ENTRIES:
            raise IrregularFileError(folder, f"holds more than {_MOST_ENTRIES:,} files")


def require_plain_entry(path: StrPath, folder: StrPath) -> None:
    """Raise IrregularFileError for an entry below a folder that is no file or folder inside it."""
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        real = require_inside(path, folder)
        if not os.path.exists(real):
            return  # a link to nothing: there is nothing to read, and a write replaces the link
        mode = os.stat(real).st_mode
    if not stat.S_ISDIR(mode):
        _require_regular(Path(path), mode)


def _roots(folder: Path) -> list[str]:
    """Return the folders that links of a folder may lead to: itself and, for a snapshot in the hub's cache, its model.

    models--Qwen--Qwen3-8B/snapshots/1a2b/config.json is a link to models--Qwen--Qwen3-8B/blobs/3c4d.
    """
    real = Path(os.path.realpath(folder))
    roots = [os.fspath(real)]
    if real.parent.name == _SNAPSHOTS and real.parents[1].name.startswith(_REPOSITORIES):
        roots.append(os.fspath(real.parents[1]))
    return roots


def _opened(path: Path, real: str) -> BufferedReader:
    """Open the file `real`, which has no links in it. Messages name `path`."""
    _require_regular(path, os.stat(real).st_mode)
    # O_NONBLOCK: if somebody replaces the file by a pipe now, opening it must not wait for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
    number = os.open(real, flags)
    # What was opened is looked at again, since it may be another file than the one above.
    try:
        _require_regular(path, os.fstat(number).st_mode)
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
    """Return the JSON object in a file that kubetune wrote. Raise EnvironmentFault if it is damaged or no file.

    `folder`: the folder that it must be in, by default its own.
    """
    try:
        value = json.loads(read_inside(path, folder))
        if isinstance(value, dict):
            return value
        reason = f"it holds a {type(value).__name__}"
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
    raise EnvironmentFault(
        f"{path} is damaged ({reason}); expected a JSON object that kubetune wrote. Put it back from a copy, such as a "
        "mirror's"
    )


def sha256_file(path: StrPath) -> str:
    """Return the SHA-256 of a file's bytes, in hex."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def join_inside(folder: StrPath, relative: str) -> Path:
    """Return `folder / relative`, resolved, for a path that comes from data.

    Raise ValueError that says why, if the path is absolute, has a NUL, or leads out of the folder (also by a link).
    """
    if "\0" in relative:
        raise ValueError(f"path {relative!r} holds a NUL byte")
    if os.path.isabs(relative) or "://" in relative:
        raise ValueError(f"path {relative!r} must be relative to {folder}")
    # Resolving follows links and `..`, so that what is compared are the real places.
    root = Path(folder).resolve()
    joined = (root / relative).resolve()
    if not joined.is_relative_to(root):
        raise ValueError(f"path {relative!r} leads outside {folder}")
    return joined
