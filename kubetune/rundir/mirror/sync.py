"""The copy of a run directory in an object store: sends what is new, fetches what is newer there, keeps steps whole.

Of a checkpoint the manifest is sent last and deleted first: a step that has one is whole. Stores are fsspec's;
credentials and endpoints are those their libraries look for. When to send, and what to do while a store is away, is
copier.py's; whose copy it is, lease.py's.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kubetune import errors
from kubetune.base import files, logs, whole_folder
from kubetune.config.naming import RESOLVED
from kubetune.extras import require
from kubetune.rundir import checkpoints, metrics
from kubetune.rundir.mirror.lease import REMOTE, Lease
from kubetune.rundir.mirror.store import PatientStore

LIBRARIES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}
LINKS = ("best", "last")
FETCHING = ".fetching"
"""In a run directory while it is fetched, and after a fetch that was cut off: less may be here than seems to be."""
RUN_FILES = (
    metrics.CONFIG, RESOLVED, metrics.PLAN, metrics.METRICS, metrics.TIMINGS, metrics.EVENTS, metrics.TRACKING,
    metrics.REPORT, metrics.IDENTITY, metrics.BASE,
)  # fmt: skip
"""Files that a run needs to go on, besides a checkpoint."""
RANK_LOG = re.compile(r"logs/rank-\d+\.log")
SECONDS_BETWEEN_LOGS = 30.0

_log = logs.family_logger("MIRROR")


def check_installed(address: str) -> None:
    """Raise ConfigError when the library for an address is not there, or it is none. Imports none."""
    scheme, _, place = address.partition("://")
    library = LIBRARIES.get(scheme)
    if library is None or not place.partition("/")[2].strip("/"):
        raise errors.ConfigError(
            f"{address}: expected SCHEME://BUCKET/PATH with one of {', '.join(LIBRARIES)}. Nothing was sent."
        )
    require(address, library)


@contextmanager
def explained_disk(path: Path) -> Iterator[None]:
    """As `files.explained_writes`, for what this disk refuses alone: OSErrors of a store's library may pass."""
    try:
        yield
    except OSError as error:
        if error.errno in files.DISK_FULL or error.filename is not None:
            with files.explained_writes(path):
                raise
        raise


class _Damaged(Exception):
    """A checkpoint came home other than its manifest says."""


class Mirror:
    """One run directory and its copy. `send` and `fetch` raise whatever the store's library raises."""

    def __init__(self, run_dir: Path, address: str) -> None:
        check_installed(address)
        from fsspec.core import url_to_fs

        self.run_dir, self.address = run_dir, address
        logging.getLogger("gcsfs").setLevel(
            logging.CRITICAL
        )  # tracebacks of what is told here in a line
        try:
            # Another process may write there too; what was listed a minute ago is not what is there.
            found, root = url_to_fs(address, use_listings_cache=False, skip_instance_cache=True)
        except (ValueError, OSError) as error:
            library = LIBRARIES[address.partition("://")[0]]
            raise errors.ConfigError(
                f"{address} cannot be opened: {error}. Credentials are looked for where {library} does so. "
                "Nothing was sent."
            ) from error
        self._fs, self._root = PatientStore(found), root.rstrip("/")
        self.lease = Lease(self._fs, self._root, address, run_dir)
        self._sent: dict[str, tuple[int, int]] = {}
        self._sent_steps: dict[int, str] = {}
        self._sent_links: dict[str, str] = {}
        self._last_logs = -SECONDS_BETWEEN_LOGS

    def remote_files(self) -> dict[str, int]:
        """Sizes of the run's files in the store, by their path in the run directory."""
        try:
            found = self._fs.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        named = {name[len(self._root) + 1 :]: int(info["size"]) for name, info in found.items()}
        return {name: size for name, size in named.items() if name != REMOTE}

    def send(self, *, everything: bool = True) -> None:
        """Make the copy what the directory is now. Not `everything`: logs only every half minute.

        Raises ConfigError where the copy is another run's, or a later start of this one keeps it up.
        """
        self.lease.check()
        steps = [
            s
            for s in checkpoints.steps(self.run_dir)
            if (self._folder(s) / checkpoints.MANIFEST).is_file()
        ]
        # After the look at the checkpoints, whose metrics are on disk before they are: so they are sent before, too.
        if everything or time.monotonic() - self._last_logs >= SECONDS_BETWEEN_LOGS:
            self._last_logs, everything = time.monotonic(), True
        for name, facts in self._run_files(everything):
            if self._sent.get(name) != facts:
                self._put(self.run_dir / name, name)
                self._sent[name] = facts
        for step in steps:
            self._send_step(step)
        for name in LINKS:
            self._send_link(name)
        self._forget_pruned(steps)
        if everything:
            self._require_arrival({name: size for name, (size, _) in self._sent.items()})

    def _require_arrival(self, sizes: Mapping[str, int]) -> None:
        """Raise OSError where the store has less than it took: a network's login page, say, takes everything."""
        there = self.remote_files()
        if lost := [name for name, size in sizes.items() if there.get(name, -1) < size]:
            for name in lost:
                self._sent.pop(name, None)
            raise OSError(
                f"{lost[0]} was taken but is not there"
                + f", nor {len(lost) - 1} more" * (len(lost) > 1)
            )

    def _folder(self, step: int) -> Path:
        return checkpoints.folder_of(self.run_dir, step)

    def _run_files(self, everything: bool) -> Iterator[tuple[str, tuple[int, int]]]:
        for path in sorted(self.run_dir.rglob("*")):
            name = path.relative_to(self.run_dir)
            hidden = any(part.startswith(".") for part in name.parts)
            if (
                hidden
                or name.parts[0] == "checkpoints"
                or path.suffix == ".lock"
                or path.is_symlink()
            ):
                continue
            if not everything and name.parts[0] in ("logs", "tensorboard"):
                continue
            try:
                if path.is_file():
                    found = path.stat()
                    yield str(name), (found.st_size, found.st_mtime_ns)
            except FileNotFoundError:
                continue  # it was there a moment ago

    def _put(self, path: Path, name: str) -> int:
        """Send a file, and return its size before; one that has just gone is 0."""
        try:
            size = path.stat().st_size
            self._fs.put_file(str(path), f"{self._root}/{name}")
        except FileNotFoundError:
            if path.exists():
                raise  # it is the bucket that is missing
            return 0
        return size

    def _send_step(self, step: int) -> None:
        folder = self._folder(step)
        try:
            manifest = files.read_inside(folder / checkpoints.MANIFEST, self.run_dir).decode()
            # The run directory may have been received, with links to what is not to be sent.
            files.require_plain(folder)
        except FileNotFoundError:
            return  # pruned meanwhile
        if self._sent_steps.get(step) == manifest:
            return
        place = f"{self._root}/checkpoints/{folder.name}"
        there = self.lease.read(f"checkpoints/{folder.name}/{checkpoints.MANIFEST}")
        if there != manifest:
            if (
                there is not None
            ):  # another checkpoint of this step, which is not whole from here on
                self._fs.rm_file(f"{place}/{checkpoints.MANIFEST}")
            sizes = {}
            for path in sorted(folder.rglob("*")):
                if path.is_file() and path.name != checkpoints.MANIFEST:
                    name = f"checkpoints/{folder.name}/{path.relative_to(folder)}"
                    sizes[name] = self._put(path, name)
            if not (folder / checkpoints.MANIFEST).exists():
                return
            self._require_arrival(sizes)
            self._fs.pipe_file(f"{place}/{checkpoints.MANIFEST}", manifest.encode())
            _log.info("%s is at %s", folder.name, self.address)
        self._sent_steps[step] = manifest

    def _send_link(self, name: str) -> None:
        link = self.run_dir / "checkpoints" / name
        target = link.readlink().name if link.is_symlink() else None
        if (
            target is not None
            and self._sent_links.get(name) != target
            and self._step_of(target) in self._sent_steps
        ):
            self._fs.pipe_file(f"{self._root}/checkpoints/{name}", target.encode())
            self._sent_links[name] = target

    @staticmethod
    def _step_of(folder_name: str) -> int:
        found = checkpoints.STEP_FOLDER.fullmatch(folder_name)
        return int(found[1]) if found else -1

    def _forget_pruned(self, steps: Sequence[int]) -> None:
        """Delete steps that are gone here, but never the newest there: it may be all there is of a longer run."""
        if not steps:
            return
        kept = int(
            json.loads((self.run_dir / RESOLVED).read_text())["training"]["save_total_limit"]
        )
        # Steps that never came to this machine go as soon as they would have gone where they were made.
        oldest = steps[-kept] if len(steps) >= kept else 0
        for step in self.remote_steps():
            if (
                step not in steps
                and step < steps[-1]
                and (step in self._sent_steps or step < oldest)
            ):
                self._delete_step(step)

    def _delete_step(self, step: int) -> None:
        place = f"{self._root}/checkpoints/{self._folder(step).name}"
        self._fs.rm_file(f"{place}/{checkpoints.MANIFEST}")
        self._fs.rm(place, recursive=True)
        self._sent_steps.pop(step, None)

    def remote_steps(self) -> list[int]:
        """Steps whose checkpoint in the store is whole, in order."""
        marker = re.compile(
            rf"checkpoints/{checkpoints.STEP_FOLDER.pattern}/{re.escape(checkpoints.MANIFEST)}"
        )
        return sorted(int(m[1]) for name in self.remote_files() if (m := marker.fullmatch(name)))

    def fetch(self, *, everything: bool = False) -> int | None:
        """Bring the run here where the store knows it longer; returns the step it can go on from, None for nothing.

        The newest checkpoint and the best one come, each checked and then named; `everything`: all files there are.
        Raises ConfigError where the directory holds another run.
        """
        self.lease.recognise(claims=False)
        there = self.remote_files()
        remote, local = self.remote_steps(), checkpoints.steps(self.run_dir)
        mark = self.run_dir / FETCHING
        is_half_here = mark.exists()
        if not there:
            if is_half_here:
                raise OSError(
                    f"nothing is there now, but a fetch of the run was cut off before; {self.run_dir} holds a part of "
                    "it. Put the copy back, or remove this directory to start over"
                )
            return None
        is_longer = bool(remote) and (not local or remote[-1] > local[-1])
        if not (everything or not local or is_half_here or is_longer):
            return None
        files.write_atomic(mark, "")
        links = {name: self.lease.read(f"checkpoints/{name}") for name in LINKS}
        named = [name for name in there if not name.startswith("checkpoints/")]
        needed = {
            name for name in named if name in RUN_FILES or name.startswith(f"{metrics.ANSWERS}/")
        }
        wanted = (
            named
            if everything
            else [name for name in named if name in needed or self._is_longer(name, there)]
        )
        best = self._step_of(links["best"] or "")
        if RESOLVED in there:
            self._fetch_file(
                RESOLVED, there
            )  # first: it tells other nodes on the same disk whose directory this is
        for step in remote[:-1]:
            if everything or step == best:
                self._fetch_step(step)
        for name in wanted:
            self._fetch_file(name, there)
        newest = self._fetch_newest(
            remote
        )  # last, because a fetch that was cut off is known by its lack
        if newest is None and remote and not local:
            raise errors.ConfigError(
                f"{self.address}: no checkpoint is whole, of {len(remote)}. Put one back there, or start over with "
                "another address. Nothing was trained."
            )
        if newest is not None:
            checkpoints.link(self.run_dir, "last", newest)
        if self._folder(best).is_dir():
            checkpoints.link(self.run_dir, "best", best)
        mark.unlink()
        return newest

    def _fetch_file(self, name: str, there: Mapping[str, int]) -> None:
        """A file of the run, by way of the disk and not of the memory: exports are large."""
        final = files.join_inside(self.run_dir, name)
        with files.written_whole(final, explained=explained_disk) as file:
            self._get(f"{self._root}/{name}", Path(file.name), there[name])

    def _get(self, place: str, path: Path, size: int) -> None:
        """Fetch a file that the store lists with this size; it may have grown since. Raises OSError for less."""
        self._fs.get_file(place, str(path))
        if (got := path.stat().st_size) < size:
            raise OSError(f"{place} came with {got:,} bytes instead of {size:,}")

    def _is_longer(self, name: str, there: Mapping[str, int]) -> bool:
        """The store knows more of this log of a rank, which is appended to over all starts."""
        here = self.run_dir / name
        return bool(RANK_LOG.fullmatch(name)) and (
            not here.is_file() or here.stat().st_size < there[name]
        )

    def _fetch_newest(self, steps: Sequence[int]) -> int | None:
        for step in reversed(steps):
            if self._fetch_step(step):
                return step
        return None

    def _fetch_step(self, step: int) -> bool:
        """Fetch a checkpoint unless it is here; whether it is whole."""
        final = self._folder(step)
        if final.is_dir() and checkpoints.verify(final) is None:
            return True
        with explained_disk(final):
            final.parent.mkdir(parents=True, exist_ok=True)
        place = f"{self._root}/checkpoints/{final.name}/"
        aside = whole_folder.written(
            final, "fetch", set_aside=checkpoints.set_aside, explained=explained_disk
        )
        with suppress(_Damaged), aside as partial:
            for name, facts in self._fs.find(place, detail=True).items():
                target = files.join_inside(partial, name[len(place) :])
                target.parent.mkdir(parents=True, exist_ok=True)
                self._get(name, target, int(facts["size"]))
            if problem := checkpoints.verify(partial):
                _log.warning("%s at %s %s; left there", final.name, self.address, problem)
                raise _Damaged
            return True
        return False
