"""Copies the run directory of a cluster here: resumable, and every byte checked against the SHA-256 it has there.

Files grow and go while a run goes on. A file is copied as it was when it was listed; where that cannot be had any more
the folder is listed anew.
"""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from kubetune.base.files import explained_writes, join_inside, sha256_file
from kubetune.errors import EnvironmentFault
from kubetune.k8s.api.api_errors import Unreachable
from kubetune.k8s.api.client import Cluster
from kubetune.k8s.cluster.asking_pods import PodContainer, ask

_ROUNDS = 3
_TRIES_ALONE = 10
_PATIENCE_SECONDS = 120.0
_PAUSE_SECONDS = 1.0
_KEPT = "what was copied before it stays"
# The first N bytes from an offset on, by what every image has.
_READ = 'tail -c "+$1" -- "$2" | head -c "$3"'


@dataclass
class Downloaded:
    """What a download has done."""

    copied: set[str] = field(default_factory=set)  # files
    bytes: int = 0  # that went over the network now
    unchanged: set[str] = field(default_factory=set)  # files that were here already


@dataclass(frozen=True)
class _File:
    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class _Link:
    path: str
    link: str


def _entry(value: Any) -> _File | _Link | str:
    """Return what a line of a pod's list means; the path alone of what is neither file nor link."""
    match value:
        case {"path": str(path), "link": str(link)}:
            return _Link(path, link)
        case {"path": str(path), "size": int(size), "sha256": str(sha256)}:
            return _File(path, size, sha256)
        case {"path": str(path)}:
            return path
    raise EnvironmentFault(
        f"refused to copy: the pod lists {str(value)[:200]!r}; expected a path, with size and hash; {_KEPT}"
    )


def download(
    cluster: Cluster,
    target: PodContainer,
    folder: str,
    to: Path,
    globs: Sequence[str],
    done: Downloaded,
    tell: Callable[[str], None],
) -> None:
    """Copy the files of `folder`, as `target` sees it, into `to`; what is there and equal stays.

    Without `globs`: all but the checkpoints that are neither `best` nor `last`. `done` is added to. `tell` gets the path
    of each file copied. Raise NoAnswer or Refused when the target has ended, another EnvironmentFault when the disk here
    is full, a path would lead outside, or the connection stays away.
    """
    for _ in range(_ROUNDS):
        listed = [_entry(value) for value in ask(cluster, target, "list", folder, *globs)]
        changed = []
        for entry in listed:
            if not isinstance(entry, _File):
                continue
            if not _fetch(cluster, target, folder, to, entry, done, tell):
                changed.append(entry.path)
        # Links last: what they lead to has to be here.
        for entry in listed:
            if isinstance(entry, _Link):
                _link(to, entry)
            elif isinstance(entry, str):
                tell(f"{entry} left out: neither a file nor a link")
        if not changed:
            return

    # What is rewritten all the time is asked for by itself, so that it has no time to change.
    for path in changed:
        if not _fetch_alone(cluster, target, folder, to, path, done, tell):
            raise EnvironmentFault(
                f"{path} changed while being copied, {_ROUNDS + _TRIES_ALONE} times; run the same command again, or name "
                "the files you want"
            )


def _fetch_alone(
    cluster: Cluster,
    target: PodContainer,
    folder: str,
    to: Path,
    path: str,
    done: Downloaded,
    tell: Callable[[str], None],
) -> bool:
    """Copy one file as it is now; return False when it changed in each of the tries."""
    for _ in range(_TRIES_ALONE):
        listed = [
            _entry(value) for value in ask(cluster, target, "list", folder, glob.escape(path))
        ]
        files = [entry for entry in listed if isinstance(entry, _File) and entry.path == path]
        # It has gone meanwhile.
        if not files:
            return True
        if _fetch(cluster, target, folder, to, files[0], done, tell):
            return True
    return False


def _fetch(
    cluster: Cluster,
    target: PodContainer,
    folder: str,
    to: Path,
    file: _File,
    done: Downloaded,
    tell: Callable[[str], None],
) -> bool:
    """Copy a file unless it is here; return False when it is no longer what was listed."""
    final = _inside(to, file.path)
    with explained_writes(final):
        if final.is_file() and _is_equal(final, file):
            if file.path not in done.copied:
                done.unchanged.add(file.path)
            return True
        final.parent.mkdir(parents=True, exist_ok=True)
        # Named after its contents, so that only a part of the same contents is gone on with.
        part = final.with_name(f".{final.name}.{file.sha256[:12]}.part")
        began = 0
        going_on = ""
        if part.exists():
            began = part.stat().st_size
        if began:
            going_on = f", going on after {began:,}"
        tell(f"{file.path} ({file.size:,} bytes{going_on})")
        with part.open("ab") as sink:
            _receive(cluster, target, f"{folder}/{file.path}", sink, file.size)
            sink.flush()
            os.fsync(sink.fileno())
        if not _is_equal(part, file):
            part.unlink()
            return False
        os.replace(part, final)
    done.copied.add(file.path)
    done.bytes += file.size - began
    return True


def _is_equal(path: Path, file: _File) -> bool:
    """True if a file here has the size and the hash that were listed."""
    return path.stat().st_size == file.size and sha256_file(path) == file.sha256


def _receive(cluster: Cluster, target: PodContainer, path: str, sink: BinaryIO, size: int) -> None:
    """Append what is missing up to `size` bytes; connections that break are taken up where they were."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (at := sink.tell()) < size:
        argv = ["sh", "-c", _READ, "sh", str(at + 1), path, str(size - at)]
        try:
            cluster.exec(target.pod, target.container, argv, stdout=sink)
            # The command ended in good order, so the file has become shorter, or has gone.
            if sink.tell() < size:
                return
        except Unreachable:
            if sink.tell() > at:
                deadline = time.monotonic() + _PATIENCE_SECONDS
            elif time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_SECONDS)


def _link(to: Path, entry: _Link) -> None:
    """Make the same relative link, if it leads to something below `to` by the links that are there by now."""
    path = _inside(to, str(Path(entry.path).parent)) / Path(entry.path).name
    relative = path.parent.relative_to(to.resolve())
    if os.path.isabs(entry.link):
        raise EnvironmentFault(
            f"refused to copy: link {entry.path} leads to {entry.link}, outside {to}; {_KEPT}"
        )
    # Not by its text: `x/../y` is not `y` where x is itself a link.
    _inside(to, str(relative / entry.link))
    with explained_writes(path):
        if path.is_symlink() and os.readlink(path) == entry.link:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.link")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(entry.link)
        os.replace(temporary, path)
        # What an earlier link led to may be elsewhere now that there is this one.
        for link in _links(to):
            if not _leads_inside(to, link):
                path.unlink()
                raise EnvironmentFault(
                    f"refused to copy: link {entry.path} has {link} lead outside {to}; {_KEPT}"
                )


def _leads_inside(to: Path, link: Path) -> bool:
    """True if a link leads to something below a folder; false of links that lead in a circle."""
    try:
        return link.resolve().is_relative_to(to.resolve())
    except RuntimeError:
        return False


def _links(to: Path) -> Iterator[Path]:
    """Yield all links below a folder."""
    for folder, folders, names in os.walk(to):
        for name in (*folders, *names):
            path = Path(folder, name)
            if path.is_symlink():
                yield path


def _inside(to: Path, relative: str) -> Path:
    """Return a path below a folder. Raise EnvironmentFault where a name of the pod would lead outside.

    The pod is not to be trusted with the rest of this disk.
    """
    try:
        return join_inside(to, relative)
    # RuntimeError: links that lead in a circle.
    except (ValueError, RuntimeError) as error:
        raise EnvironmentFault(f"refused to copy: {error}; {_KEPT}") from None
