"""Questions that kubetune puts to a pod: run there by exec, with the pod's Python, answered in JSON on standard output.

    python -m kubetune.k8s.cluster.in_pod progress RUN_DIR       step, loss, speed, time left, how it ended
    python -m kubetune.k8s.cluster.in_pod status RUN_DIR         what `kubetune watch` shows
    python -m kubetune.k8s.cluster.in_pod list RUN_DIR [GLOB …]  each file with its size and SHA-256, each link
    python -m kubetune.k8s.cluster.in_pod usage                  CPU, memory, /dev/shm and the volumes of this pod
    python -m kubetune.k8s.cluster.in_pod unpack FOLDER          a tar archive from standard input
    python -m kubetune.k8s.cluster.in_pod idle                   nothing, until it is asked to stop
    python -m kubetune.k8s.cluster.in_pod start FOLDER COMMAND…  a command in the background, with the code in FOLDER/tree
    python -m kubetune.k8s.cluster.in_pod follow FOLDER OFFSET   what it prints, to its end; its exit code
    python -m kubetune.k8s.cluster.in_pod stop FOLDER            SIGTERM for it; its exit code

Progress comes this way, not by the API server: pods have no token for it and need none, every kind of workload works
alike, and what is shown is what the run directory says, not what a log line happened to look like.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from kubetune.base import files
from kubetune.base.processes import is_alive
from kubetune.base.signals import STAY, Relay
from kubetune.errors import ENVIRONMENT, OK
from kubetune.rundir import heartbeat
from kubetune.rundir.status import progress, read_status

_CHUNK_BYTES = 1024 * 1024
_WATCHER = "watcher"
_FOLLOW_SECONDS = 0.2
_USAGE_SECONDS = 0.5


def listing(run_dir: Path, globs: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield an entry for each file and link below a folder, except hidden files and heartbeats.

        {"path": "metrics.jsonl", "size": 812, "sha256": "9f86…"}      a file
        {"path": "checkpoints/last", "link": "step-000020"}            a link
        {"path": "pipe"}                                               neither

    With `globs` only those that match one; without, all but the checkpoints that are neither `best` nor `last`.
    """
    checkpoints = run_dir / "checkpoints"
    chosen = set()
    for name in ("best", "last"):
        if (checkpoints / name).is_symlink():
            chosen.add((checkpoints / name).resolve().name)

    for folder, folders, names in os.walk(run_dir):
        parent = Path(folder)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        # os.walk lists links to folders among the folders, and does not enter them.
        links = [name for name in folders if (parent / name).is_symlink()]
        if parent == checkpoints and chosen and not globs:
            folders[:] = [name for name in folders if name in chosen]
        for path in sorted(parent / name for name in (*names, *links)):
            relative = str(path.relative_to(run_dir))
            is_hidden = path.name.startswith(".") or path.suffix == ".lock"
            is_beat = fnmatch(path.name, heartbeat.BEATS)
            if is_hidden or is_beat or not _matches(relative, globs):
                continue
            if path.is_symlink():
                yield {"path": relative, "link": os.readlink(path)}
            elif path.exists() and not path.is_file():
                yield {"path": relative}
            else:
                yield from _file_entry(path, relative)


def _matches(path: str, globs: Sequence[str]) -> bool:
    """True if a path, or a folder that it is in, matches one of the globs, or there are none."""
    if not globs:
        return True
    return any(fnmatch(path, glob) or fnmatch(path, f"{glob}/*") for glob in globs)


def _file_entry(path: Path, relative: str) -> Iterator[dict[str, Any]]:
    """Yield the entry of a regular file as it is now, though it may grow meanwhile; none when it has just gone."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            left = size
            digest = hashlib.sha256()
            while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
                digest.update(chunk)
                left -= len(chunk)
    except FileNotFoundError:
        return
    yield {"path": relative, "size": size, "sha256": digest.hexdigest()}


def usage() -> dict[str, Any]:
    """Return the CPU cores in use, bytes of memory and of /dev/shm, and bytes free on the volumes.

    Summed over the processes that this container sees, so that no metrics server is needed.
    """
    cpu_seconds = _cpu_seconds()
    began = time.monotonic()
    time.sleep(_USAGE_SECONDS)
    cores = (_cpu_seconds() - cpu_seconds) / (time.monotonic() - began)
    shm = shutil.disk_usage("/dev/shm")
    free = {}
    for name in ("cache", "outputs"):
        if Path(f"/{name}").is_dir():
            free[name] = shutil.disk_usage(f"/{name}").free
    return {
        # Processes that end take their seconds along, so the difference may be negative.
        "cpu_cores": round(max(0.0, cores), 2),
        "memory_bytes": _resident_bytes(),
        "shm_used_bytes": shm.used,
        "shm_total_bytes": shm.total,
        "cache_free_bytes": free.get("cache"),
        "outputs_free_bytes": free.get("outputs"),
    }


def _stats() -> Iterator[list[str]]:
    """Yield the fields of /proc/PID/stat from the third on, for each process but this one."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        if path.parent.name != str(os.getpid()):
            try:
                # The command comes second, in brackets, and may itself hold spaces and brackets.
                yield path.read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue


# proc(5) counts from 1, and `_stats` begins at field 3: field 14 (utime) is index 11, 15 (stime) 12, 24 (rss) 21.
def _cpu_seconds() -> float:
    """Return the CPU time of all processes, in user mode and in the kernel."""
    ticks = 0
    for fields in _stats():
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _resident_bytes() -> int:
    """Return the memory of all processes. Pages that they share count more than once."""
    pages = 0
    for fields in _stats():
        pages += int(fields[21])
    return pages * os.sysconf("SC_PAGE_SIZE")


def unpack(folder: Path) -> int:
    """Replace what is in `folder` by the tar archive on standard input, which cannot reach outside of it."""
    if _is_running(folder):
        print("training goes on here; end it first: kubetune dev stop", file=sys.stderr)
        return ENVIRONMENT
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        extract(archive, folder)
    return OK


def extract(archive: tarfile.TarFile, folder: Path) -> None:
    """Unpack an archive into a folder. Raise tarfile.TarError for a member that would reach outside, or is a device."""
    # Python 3.11.0 to 3.11.3 have no filters, and pods take whatever the image has.
    if hasattr(tarfile, "data_filter"):
        archive.extractall(folder, filter="data")
        return
    for member in archive:
        _require_inside(member, os.path.realpath(folder))
        # As the filter does: owned by who unpacks, and not writable by others.
        member.uid = os.getuid()
        member.gid = os.getgid()
        member.uname = member.gname = ""
        member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
        archive.extract(member, folder)


def _require_inside(member: tarfile.TarInfo, folder: str) -> None:
    def is_inside(path: str) -> bool:
        # Of an earlier member that is a link, this is where it leads.
        return os.path.commonpath([folder, os.path.realpath(path)]) == folder

    member.name = member.name.lstrip("/")
    place = os.path.join(folder, member.name)
    if not is_inside(place):
        raise tarfile.TarError(f"{member.name!r} would be unpacked outside of {folder}")
    if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
        raise tarfile.TarError(f"{member.name!r} is a device or a pipe")
    if member.issym() or member.islnk():
        # A symbolic link counts from where it is, a hard link from the top.
        start = os.path.dirname(place) if member.issym() else folder
        if os.path.isabs(member.linkname) or not is_inside(os.path.join(start, member.linkname)):
            raise tarfile.TarError(f"{member.name!r} is a link to outside of {folder}")


def idle() -> None:
    """Hold the pod for people to work in. As its first process it must mind SIGTERM, or each end takes minutes."""
    with Relay() as relay:
        print("kubetune: idle; `kubetune dev run` starts training here", flush=True)
        relay.wait_for_stop()


def start(folder: Path, *command: str) -> None:
    """Start a command that outlives this one; its output goes to `log` and, at its end, its exit code to `exit`.

    `watcher` is the process that waits for it: while that lives, the exit code is still to come.
    """
    for name in ("exit", "pid", _WATCHER):
        (folder / name).unlink(missing_ok=True)
    log = (folder / "log").open("wb", buffering=0)
    if watcher := os.fork():
        files.write_atomic(folder / _WATCHER, str(watcher))
        return
    # From here on in the background: of a session of its own, holding nothing of the one that asked.
    os.setsid()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    environ = dict(os.environ)
    environ.pop(STAY, None)
    # The user's code comes before the kubetune of the image.
    paths = (str(folder / "tree"), environ.get("PYTHONPATH"))
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    process = subprocess.Popen(command, env=environ, cwd=folder / "tree")
    files.write_atomic(folder / "pid", str(process.pid))
    files.write_atomic(folder / "exit", str(process.wait()))
    os._exit(0)


def follow(folder: Path, offset: int) -> int:
    """Pass on what the command of `start` prints, from a byte on, until it ends; return its exit code."""
    with (folder / "log").open("rb") as log:
        log.seek(offset)
        while True:
            # Asked before reading: what is written after the read is seen in the next round.
            has_ended = not _is_running(folder)
            sys.stdout.buffer.write(log.read())
            sys.stdout.flush()
            if has_ended:
                return _exit_code(folder)
            time.sleep(_FOLLOW_SECONDS)


def stop(folder: Path) -> int:
    """Ask the command of `start` to save and end, and wait until it has; return its exit code.

    Print `ended` if one ran until then.
    """
    is_asked = False
    if _is_running(folder):
        print("ended", flush=True)
    while _is_running(folder):
        # Its watcher may live before it does.
        if not is_asked and (folder / "pid").exists():
            with suppress(ProcessLookupError):
                os.kill(int((folder / "pid").read_text()), signal.SIGTERM)
            is_asked = True
        time.sleep(_FOLLOW_SECONDS)
    return _exit_code(folder)


def _is_running(folder: Path) -> bool:
    """True if the command of `start` has not ended: its exit code is not there, and somebody waits for it."""
    watcher = folder / _WATCHER
    if not watcher.exists() or (folder / "exit").exists():
        return False
    return is_alive(int(watcher.read_text()))


def _exit_code(folder: Path) -> int:
    """Return the exit code of the last command; 0 where there was none."""
    path = folder / "exit"
    if path.exists():
        code = int(path.read_text())
        # Python says -15 for a command that SIGTERM has killed, a shell 143.
        return code if code >= 0 else 128 - code
    # Nobody is left who could write the exit code.
    if (folder / _WATCHER).exists():
        return ENVIRONMENT
    return OK


def _print_json(value: object) -> None:
    """Print a value as one line of JSON."""
    print(json.dumps(value), flush=True)


def _print_listing(run_dir: str, *globs: str) -> None:
    """Print entries as they come, since hashes of a large checkpoint take minutes."""
    for entry in listing(Path(run_dir), globs):
        _print_json(entry)


_ANSWERS: dict[str, Callable[..., int | None]] = {
    "progress": lambda run_dir: _print_json(progress(Path(run_dir))),
    "status": lambda run_dir: _print_json(read_status(Path(run_dir))),
    "list": _print_listing,
    "usage": lambda: _print_json(usage()),
    "unpack": lambda folder: unpack(Path(folder)),
    "idle": idle,
    "start": lambda folder, *command: start(Path(folder), *command),
    "follow": lambda folder, offset: follow(Path(folder), int(offset)),
    "stop": lambda folder: stop(Path(folder)),
}


def main(argv: Sequence[str]) -> int:
    """Answer a question and return the exit code."""
    return _ANSWERS[argv[0]](*argv[1:]) or OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
