"""Copy a run directory to an object store, and back: send what is new, fetch what the store knows longer.

The manifest of a checkpoint is sent last and deleted first, so a step that has one in the store is whole. fsspec reaches
the stores; credentials and endpoints are those that its libraries look for. copier.py decides when to send and what to
do while a store does not answer; lease.py decides whose copy it is.
"""

from __future__ import annotations

import json
import logging
import re
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
# File in a run directory during a fetch, and after a fetch that was cut off: files may be missing here.
FETCHING = ".fetching"
# Folders whose files a run needs to continue, as it needs those at the top.
NEEDED_FOLDERS = ("logs", metrics.ANSWERS)

_log = logs.family_logger("MIRROR")


def check_installed(address: str) -> None:
    """Raise ConfigError if this is no address of a store, or its library is not installed. Imports nothing."""
    scheme, _, place = address.partition("://")
    library = LIBRARIES.get(scheme)
    if library is None or not place.partition("/")[2].strip("/"):
        raise errors.ConfigError(
            f"{address}: expected SCHEME://BUCKET/PATH with one of {', '.join(LIBRARIES)}. Nothing was sent."
        )
    require(address, library)


@contextmanager
def explained_disk(path: Path) -> Iterator[None]:
    """Explain errors of this disk, as `files.explained_writes` does. OSErrors of a store's library pass unchanged."""
    try:
        yield
    except OSError as error:
        if error.errno in files.DISK_FULL or error.filename is not None:
            with files.explained_writes(path):
                raise
        raise


class _Damaged(Exception):
    """A fetched checkpoint does not fit its manifest."""


class Mirror:
    """A run directory and its copy in a store. `send` and `fetch` raise whatever the store's library raises."""

    def __init__(self, run_dir: Path, address: str) -> None:
        check_installed(address)
        from fsspec.core import url_to_fs

        self.run_dir = run_dir
        self.address = address
        # gcsfs logs tracebacks of errors that copier.py reports in one line.
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
        try:
            # Without a cache of listings: another process may write to the store too.
            file_system, root = url_to_fs(
                address, use_listings_cache=False, skip_instance_cache=True
            )
        except (ValueError, OSError) as error:
            library = LIBRARIES[address.partition("://")[0]]
            raise errors.ConfigError(
                f"{address} cannot be opened: {error}. Credentials are looked for where {library} does so. "
                "Nothing was sent."
            ) from error
        self._fs = PatientStore(file_system)
        self._root = root.rstrip("/")
        self.lease = Lease(self._fs, self._root, address, run_dir)

        # What this process has sent.
        self._sent: dict[str, tuple[int, int]] = {}  # file → (size, mtime in ns)
        self._sent_steps: dict[int, str] = {}  # step → text of its manifest
        self._sent_best = ""  # folder of the best checkpoint

    def remote_files(self) -> dict[str, int]:
        """Return the sizes of the run's files in the store, by their path in the run directory."""
        try:
            listing = self._fs.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        sizes = {}
        for place, facts in listing.items():
            name = place[len(self._root) + 1 :]
            if name != REMOTE:
                sizes[name] = int(facts["size"])
        return sizes

    def send(self) -> None:
        """Make the copy equal to the directory.

        Raise ConfigError if the copy belongs to another run, or a later start of this run writes to it.
        """
        self.lease.check()

        # Look at the checkpoints first, and send them last. The metrics of a checkpoint are on disk before it is, so
        # they are in the store before it is, too.
        steps = []
        for step in checkpoints.steps(self.run_dir):
            if (self._folder(step) / checkpoints.MANIFEST).is_file():
                steps.append(step)

        # Then files that are new or have changed since they were sent.
        for name, facts in self._run_files():
            if self._sent.get(name) != facts:
                self._put(self.run_dir / name, name)
                self._sent[name] = facts

        # Checkpoints before the link to the best; what was pruned here goes only when its successor is in the store.
        for step in steps:
            self._send_step(step)
        self._send_best()
        self._forget_pruned(steps)
        self._require_arrival({name: size for name, (size, _) in self._sent.items()})

    def _require_arrival(self, sizes: Mapping[str, int]) -> None:
        """Raise OSError if the store lacks a file that it took. The login page of a network takes everything."""
        remote = self.remote_files()
        lost = [name for name, size in sizes.items() if remote.get(name, -1) < size]
        if not lost:
            return
        for name in lost:
            self._sent.pop(name, None)  # so that the next `send` sends it again
        raise OSError(f"{lost[0]} was taken but is not there, of {len(lost)} such files")

    def _folder(self, step: int) -> Path:
        return checkpoints.folder_of(self.run_dir, step)

    def _run_files(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield the name, and (size, mtime in ns), of each file to copy that is not part of a checkpoint."""
        for path in sorted(self.run_dir.rglob("*")):
            name = path.relative_to(self.run_dir)
            # Hidden names are of files that are being written; links could lead out of the run directory.
            is_hidden = any(part.startswith(".") for part in name.parts)
            if (
                is_hidden
                or name.parts[0] == "checkpoints"
                or path.suffix == ".lock"
                or path.is_symlink()
            ):
                continue
            try:
                if path.is_file():
                    facts = path.stat()
                    yield str(name), (facts.st_size, facts.st_mtime_ns)
            except FileNotFoundError:
                continue  # deleted a moment ago

    def _put(self, path: Path, name: str) -> int:
        """Send a file, and return the size that it had. 0 if it has just been deleted."""
        try:
            size = path.stat().st_size
            self._fs.put_file(str(path), f"{self._root}/{name}")
        except FileNotFoundError:
            if path.exists():
                raise  # the bucket is missing, not the file
            return 0
        return size

    def _send_step(self, step: int) -> None:
        """Send a checkpoint unless the store has it. Its manifest is sent last."""
        folder = self._folder(step)
        try:
            manifest = files.read_inside(folder / checkpoints.MANIFEST, self.run_dir).decode()
            # A received run directory may have links to files of this user, which must not be sent.
            files.require_plain(folder)
        except FileNotFoundError:
            return  # deleted meanwhile
        if self._sent_steps.get(step) == manifest:
            return
        place = f"checkpoints/{folder.name}/{checkpoints.MANIFEST}"
        remote_manifest = self.lease.read(place)
        if remote_manifest != manifest:
            # Another checkpoint of this step is no longer whole from here on.
            if remote_manifest is not None:
                self._fs.rm_file(f"{self._root}/{place}")
            sizes = {}
            for path in sorted(folder.rglob("*")):
                if path.is_file() and path.name != checkpoints.MANIFEST:
                    name = f"checkpoints/{folder.name}/{path.relative_to(folder)}"
                    sizes[name] = self._put(path, name)
            if not (folder / checkpoints.MANIFEST).exists():
                return  # deleted meanwhile
            self._require_arrival(sizes)
            self._fs.pipe_file(f"{self._root}/{place}", manifest.encode())
            _log.info("%s is at %s", folder.name, self.address)
        self._sent_steps[step] = manifest

    def _send_best(self) -> None:
        """Write where `best` leads, once that checkpoint is in the store. Stores have no links."""
        link = self.run_dir / "checkpoints" / "best"
        if not link.is_symlink():
            return
        target = link.readlink().name
        if target != self._sent_best and self._step_of(target) in self._sent_steps:
            self._fs.pipe_file(f"{self._root}/checkpoints/best", target.encode())
            self._sent_best = target

    @staticmethod
    def _step_of(folder_name: str) -> int:
        """Return the step of a checkpoint's folder, such as 120 for step-000120; -1 for another name."""
        match = checkpoints.STEP_FOLDER.fullmatch(folder_name)
        if match is None:
            return -1
        return int(match[1])

    def _forget_pruned(self, steps: Sequence[int]) -> None:
        """Delete steps in the store that were deleted here, but none that is newer than all of `steps`.

        Such a step may be all that is left of a run that was longer elsewhere.
        """
        if not steps:
            return
        config = json.loads((self.run_dir / RESOLVED).read_text())
        limit = int(config["training"]["save_total_limit"])
        # A step that was never on this machine goes when it would have gone on the machine that made it.
        oldest_kept = 0
        if len(steps) >= limit:
            oldest_kept = steps[-limit]
        for step in self.remote_steps():
            if step in steps or step >= steps[-1]:
                continue
            if step in self._sent_steps or step < oldest_kept:
                self._delete_step(step)

    def _delete_step(self, step: int) -> None:
        """Delete a checkpoint in the store, its manifest first, so that no half of it looks whole."""
        place = f"{self._root}/checkpoints/{self._folder(step).name}"
        self._fs.rm_file(f"{place}/{checkpoints.MANIFEST}")
        self._fs.rm(place, recursive=True)
        self._sent_steps.pop(step, None)

    def remote_steps(self) -> list[int]:
        """Return the steps whose checkpoint in the store is whole, in ascending order."""
        manifest = re.compile(
            rf"checkpoints/{checkpoints.STEP_FOLDER.pattern}/{re.escape(checkpoints.MANIFEST)}"
        )
        steps = []
        for name in self.remote_files():
            match = manifest.fullmatch(name)
            if match:
                steps.append(int(match[1]))
        return sorted(steps)

    def fetch(self, *, everything: bool = False) -> int | None:
        """Fetch the run if the store knows more of it. Return the step that it can continue from, or None.

        The newest checkpoint and the best one are fetched and verified. `everything`: all files. Raise ConfigError if
        the directory holds another run.
        """
        self.lease.recognise(claims=False)
        sizes = self.remote_files()
        remote_steps = self.remote_steps()
        local_steps = checkpoints.steps(self.run_dir)
        mark = self.run_dir / FETCHING
        is_half_here = mark.exists()
        # An empty store: there is no copy yet, unless a fetch has begun before.
        if not sizes:
            if is_half_here:
                raise OSError(
                    f"nothing is there now, but a fetch of the run was cut off before; {self.run_dir} holds a part of "
                    "it. Put the copy back, or remove this directory to start over"
                )
            return None
        is_longer = bool(remote_steps) and (not local_steps or remote_steps[-1] > local_steps[-1])
        if not (everything or not local_steps or is_half_here or is_longer):
            return None

        files.write_atomic(mark, "")
        best = self._step_of(self.lease.read("checkpoints/best") or "")
        # The config comes first: it tells other nodes on the same disk whose directory this is.
        if RESOLVED in sizes:
            self._fetch_file(RESOLVED, sizes)
        for step in remote_steps[:-1]:
            if everything or step == best:
                self._fetch_step(step)
        for name in sizes:
            folder = name.rpartition("/")[0]
            is_needed = everything or not folder or folder in NEEDED_FOLDERS
            if is_needed and not name.startswith("checkpoints/"):
                self._fetch_file(name, sizes)
        # The newest checkpoint comes last: while it is missing, a fetch that was cut off is done again.
        newest = self._fetch_newest(remote_steps)
        if newest is None and remote_steps and not local_steps:
            raise errors.ConfigError(
                f"{self.address}: no checkpoint is whole, of {len(remote_steps)}. Put one back there, or start over "
                "with another address. Nothing was trained."
            )

        if newest is not None:
            checkpoints.link(self.run_dir, "last", newest)
        if self._folder(best).is_dir():
            checkpoints.link(self.run_dir, "best", best)
        mark.unlink()
        return newest

    def _fetch_file(self, name: str, sizes: Mapping[str, int]) -> None:
        """Fetch a file of the run, not through memory: exports are large."""
        final = files.join_inside(self.run_dir, name)
        with files.written_whole(final, explained=explained_disk) as file:
            self._get(f"{self._root}/{name}", Path(file.name), sizes[name])

    def _get(self, place: str, path: Path, size: int) -> None:
        """Fetch a file that the store lists with this size. It may have grown since. Raise OSError if it is shorter."""
        self._fs.get_file(place, str(path), size)
        fetched = path.stat().st_size
        if fetched < size:
            raise OSError(f"{place} came with {fetched:,} bytes instead of {size:,}")

    def _fetch_newest(self, steps: Sequence[int]) -> int | None:
        """Fetch the newest whole checkpoint, and return its step."""
        for step in reversed(steps):
            if self._fetch_step(step):
                return step
        return None

    def _fetch_step(self, step: int) -> bool:
        """Fetch a checkpoint unless it is here. Return True if it is whole."""
        # It may be here already, from before.
        final = self._folder(step)
        if final.is_dir() and checkpoints.verify(final) is None:
            return True
        with explained_disk(final):
            final.parent.mkdir(parents=True, exist_ok=True)
        place = f"{self._root}/checkpoints/{final.name}/"
        # Under a hidden name until every byte is checked.
        aside = whole_folder.written(
            final, "fetch", set_aside=checkpoints.set_aside, explained=explained_disk
        )
        with suppress(_Damaged), aside as partial:
            for name, facts in self._fs.find(place, detail=True).items():
                target = files.join_inside(partial, name[len(place) :])
                target.parent.mkdir(parents=True, exist_ok=True)
                self._get(name, target, int(facts["size"]))
            problem = checkpoints.verify(partial)
            if problem:
                _log.warning("%s at %s %s; left there", final.name, self.address, problem)
                raise _Damaged
            return True
        return False
