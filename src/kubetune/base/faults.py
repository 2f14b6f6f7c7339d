"""Errors of libraries and of the system in words: what ran short, and what to do."""

from __future__ import annotations

import errno
import os
import resource
import sys
import traceback

# `extras` is imported here, not where it is used: it explains errors, also that no more files can be opened.
from kubetune import extras
from kubetune.base.files import DISK_FULL, LARGER_FILES, NO_INODES, NOT_PERMITTED, lacks_inodes
from kubetune.errors import EnvironmentFault, KubetuneError, OutOfMemory, causes

# A folder where a file is expected, or the other way round.
_OF_OTHER_SORT = (errno.EISDIR, errno.ENOTDIR)
_OF_THE_SYSTEM = (
    *DISK_FULL,
    *NOT_PERMITTED,
    *_OF_OTHER_SORT,
    errno.EFBIG,
    errno.EIO,
    errno.ESTALE,
    errno.ELOOP,
    errno.ENAMETOOLONG,
)


def fault_of(error: BaseException) -> KubetuneError | None:
    """Return a fault of the environment in words. None for what may be our own mistake.

    Called for errors that no code closer to their cause has explained.
    """
    lack = extras.missing_extra(error)
    if lack is not None:
        return lack

    # What ran short may be hidden: a library fails for it, and raises another error while it handles that one.
    for cause in causes(error, hidden=True):
        shortage = _shortage_of(cause)
        if shortage is not None:
            return shortage

    # A library that cannot be loaded names its own reason. One of ours would be a bug.
    library = _library_loaded(error)
    if library is not None:
        return _library_fault(library, error)

    trouble = _folder_trouble(error)
    if trouble:
        return EnvironmentFault(
            f"the folder that this was started in {trouble}; go to another one (cd)"
        )

    # Other numbers, such as those of sockets, are for the code that caused them.
    if isinstance(error, OSError) and error.errno in _OF_THE_SYSTEM:
        return _refusal(error)
    return None


def _library_fault(library: str, error: BaseException) -> EnvironmentFault:
    """Explain why a library cannot be imported."""
    first_line = next(filter(None, str(error).splitlines()), "it says no more")
    advice = "correct the environment variable that it names, or else install its package again"
    if sys.flags.optimize > 1:
        advice = "unset PYTHONOPTIMIZE, which strips docstrings that some libraries need"
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        # Not every library says that memory ran out: some raise SystemError, or an error of their own.
        advice = f"ulimit -v allows {limit:,} bytes, which may be too few: allow more; {advice}"
    return EnvironmentFault(
        f"{library} cannot be loaded: {type(error).__name__}: {first_line}; {advice}"
    )


def _refusal(error: OSError) -> EnvironmentFault:
    """Explain an error of the file system: which file, why, and what to do."""
    name = error.filename2 or error.filename  # a rename has two; the second one was to be made
    where = ""
    if name is not None:
        where = f"{name}: "

    if error.errno == errno.EFBIG:
        advice = LARGER_FILES
    elif error.errno in DISK_FULL and name is not None and lacks_inodes(name):
        advice = NO_INODES
    elif error.errno in DISK_FULL:
        advice = "free some space"
    else:
        advice = "see that it can be read and written, or name another"
    return EnvironmentFault(f"{where}{error.strerror}; {advice}, and run the same command again")


def _library_loaded(error: BaseException) -> str | None:
    """Return the package that was being imported when an error came up in its code. None if it was none or ours."""
    # Code at the top of a module runs while it is imported. The innermost such frame is where it went wrong.
    packages = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "<module>":
            packages.append(str(frame.f_globals.get("__name__")).partition(".")[0])
    if not packages or packages[-1] in ("kubetune", "__main__"):
        return None
    return packages[-1]


def _folder_trouble(error: BaseException) -> str:
    """Say how the working folder caused an error: it is gone, or libraries cannot open its name. Empty if it did not."""
    try:
        os.getcwd().encode()
    except FileNotFoundError:
        # Another error came up in a folder that happens to be gone too.
        if isinstance(error, FileNotFoundError):
            return "is gone"
    except UnicodeEncodeError:
        # safetensors raises an error of its own, with these words.
        if isinstance(error, UnicodeEncodeError) or "not valid UTF-8" in str(error):
            return "has a name that is not UTF-8"
    return ""


def known(error: BaseException) -> KubetuneError | None:
    """Return an error as users may see it: one of ours, or a fault of the environment. None for a possible bug."""
    if isinstance(error, KubetuneError):
        return error
    return fault_of(error)


_SHORT_OF_PROCESSES = ("can't start new thread", "Resource temporarily unavailable")
_SHORT_OF_MEMORY = (
    "can't allocate memory",
    "Cannot allocate memory",
    "failed to map segment",
    "std::bad_alloc",
)


def _shortage_of(error: BaseException) -> EnvironmentFault | None:
    """Explain a lack of files, memory or processes, as Python, the loader and torch report it. None for other errors."""
    number = None
    if isinstance(error, OSError):
        number = error.errno
    text = str(error)

    # Open files.
    if number in (errno.EMFILE, errno.ENFILE):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return EnvironmentFault(
            f"{error}: this process may have {most:,} files open; allow more (ulimit -n)"
        )

    # Memory. The loader of libraries and torch say it in words alone.
    tells_of_memory = any(words in text for words in _SHORT_OF_MEMORY)
    if isinstance(error, MemoryError) or number == errno.ENOMEM or tells_of_memory:
        return _out_of_memory(text)

    # Processes and threads.
    tells_of_processes = any(words in text for words in _SHORT_OF_PROCESSES)
    if number == errno.EAGAIN or (isinstance(error, RuntimeError) and tells_of_processes):
        return _out_of_processes(text, is_thread=isinstance(error, RuntimeError))
    return None


def _out_of_memory(text: str) -> OutOfMemory:
    """Explain a lack of memory, with the limit that the shell has set, if any."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    allowed = ""
    if limit != resource.RLIM_INFINITY:
        allowed = f" ulimit -v allows {limit:,} bytes."
    first_line = (text.splitlines() or ["memory ran out"])[0]
    return OutOfMemory(
        f"out of memory: {first_line}.{allowed} Allow more, or take smaller batches or a smaller model"
    )


def _out_of_processes(text: str, *, is_thread: bool) -> EnvironmentFault:
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    allowed = f"{most:,}"
    if most == resource.RLIM_INFINITY:
        allowed = "no limit"
    # Python does not tell why a thread cannot start.
    or_memory = ""
    if is_thread:
        or_memory = "; or memory is short"
    return EnvironmentFault(
        f"no more processes or threads can be started ({text}); allow more: ulimit -u gives {allowed}, and the "
        f"container or the service may have a limit of its own (pids.max){or_memory}"
    )
