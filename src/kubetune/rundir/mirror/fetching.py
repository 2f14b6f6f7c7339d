"""Fetch a run from a store: its files, its best checkpoint, and its newest whole one last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kubetune import errors
from kubetune.base import files, logs, whole_folder
from kubetune.config.naming import RESOLVED
from kubetune.rundir import checkpoints, metrics
from kubetune.rundir.mirror.lease import Lease
from kubetune.rundir.mirror.stored_run import StoredRun, step_of

# File in a run directory during a fetch, and after a fetch that was cut off: files may be missing here.
FETCHING = ".fetching"
# Folders whose files a run needs to continue, as it needs those at the top.
NEEDED_FOLDERS = ("logs", metrics.ANSWERS)

_log = logs.family_logger("MIRROR")


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


class Fetcher:
    """Fetches a run into its directory."""

    def __init__(self, run_dir: Path, stored: StoredRun, lease: Lease) -> None:
        self._run_dir = run_dir
        self._stored = stored
        self._lease = lease

    def fetch(self, *, everything: bool = False) -> int | None:
        """Fetch the run if the store knows more of it. Return the step that it can continue from, or None.

        The newest checkpoint and the best one are fetched and verified. `everything`: all files. Raise ConfigError if
        the directory holds another run.
        """
        self._lease.recognise(claims=False)
        sizes = self._stored.files()
        remote_steps = self._stored.steps()
        local_steps = checkpoints.steps(self._run_dir)
        mark = self._run_dir / FETCHING
        is_half_here = mark.exists()
        # An empty store: there is no copy yet, unless a fetch has begun before.
        if not sizes:
            if is_half_here:
                raise OSError(
                    f"nothing is there now, but a fetch of the run was cut off before; {self._run_dir} holds a part of "
                    "it. Put the copy back, or remove this directory to start over"
                )
            return None
        is_longer = bool(remote_steps) and (not local_steps or remote_steps[-1] > local_steps[-1])
        if not (everything or not local_steps or is_half_here or is_longer):
            return None

        files.write_atomic(mark, "")
        best = step_of(self._stored.read("checkpoints/best") or "")
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
                f"{self._stored.address}: no checkpoint is whole, of {len(remote_steps)}. Put one back there, or start over "
                "with another address. Nothing was trained."
            )

        if newest is not None:
            checkpoints.link(self._run_dir, "last", newest)
        if checkpoints.folder_of(self._run_dir, best).is_dir():
            checkpoints.link(self._run_dir, "best", best)
        mark.unlink()
        return newest

    def _fetch_file(self, name: str, sizes: Mapping[str, int]) -> None:
        """Fetch a file of the run, not through memory: exports are large."""
        final = files.join_inside(self._run_dir, name)
        with files.written_whole(final, explained=explained_disk) as file:
            self._get(self._stored.place(name), Path(file.name), sizes[name])

    def _get(self, place: str, path: Path, size: int) -> None:
        """Fetch a file that the store lists with this size. It may have grown since. Raise OSError if it is shorter."""
        self._stored.store.get_file(place, str(path), size)
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
        final = checkpoints.folder_of(self._run_dir, step)
        if final.is_dir() and checkpoints.verify(final) is None:
            return True
        with explained_disk(final):
            final.parent.mkdir(parents=True, exist_ok=True)
        place = self._stored.place(f"checkpoints/{final.name}/")
        # Under a hidden name until every byte is checked.
        aside = whole_folder.written(
            final, "fetch", set_aside=checkpoints.set_aside, explained=explained_disk
        )
        with suppress(_Damaged), aside as partial:
            for name, facts in self._stored.store.find(place, detail=True).items():
                target = files.join_inside(partial, name[len(place) :])
                target.parent.mkdir(parents=True, exist_ok=True)
                self._get(name, target, int(facts["size"]))
            problem = checkpoints.verify(partial)
            if problem:
                _log.warning("%s at %s %s; left there", final.name, self._stored.address, problem)
                raise _Damaged
            return True
        return False
