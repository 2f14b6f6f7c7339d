"""Send to a store what is new in a run directory.

The manifest of a checkpoint is sent last and deleted first, so a step that has one in the store is whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kubetune.base import files, logs
from kubetune.config.naming import RESOLVED
from kubetune.rundir import checkpoints
from kubetune.rundir.mirror.lease import Lease
from kubetune.rundir.mirror.stored_run import StoredRun, step_of

_log = logs.family_logger("MIRROR")


class Sender:
    """Sends a run directory, and knows what of it this process has sent."""

    def __init__(self, run_dir: Path, stored: StoredRun, lease: Lease) -> None:
        self._run_dir = run_dir
        self._stored = stored
        self._lease = lease
        self._sent: dict[str, tuple[int, int]] = {}  # file → (size, mtime in ns)
        self._sent_steps: dict[int, str] = {}  # step → text of its manifest
        self._sent_best = ""  # folder of the best checkpoint

    def send(self) -> None:
        """Make the copy equal to the directory.

        Raise ConfigError if the copy belongs to another run, or a later start of this run writes to it.
        """
        self._lease.check()

        # Look at the checkpoints first, and send them last. The metrics of a checkpoint are on disk before it is, so
        # they are in the store before it is, too.
        steps = []
        for step in checkpoints.steps(self._run_dir):
            if (self._folder(step) / checkpoints.MANIFEST).is_file():
                steps.append(step)

        # Then files that are new or have changed since they were sent.
        for name, facts in self._run_files():
            if self._sent.get(name) != facts:
                self._put(self._run_dir / name, name)
                self._sent[name] = facts

        # Checkpoints before the link to the best; what was pruned here goes only when its successor is in the store.
        for step in steps:
            self._send_step(step)
        self._send_best()
        self._forget_pruned(steps)
        self._require_arrival({name: size for name, (size, _) in self._sent.items()})

    def _require_arrival(self, sizes: Mapping[str, int]) -> None:
        """Raise OSError if the store lacks a file that it took. The login page of a network takes everything."""
        remote = self._stored.files()
        lost = [name for name, size in sizes.items() if remote.get(name, -1) < size]
        if not lost:
            return
        for name in lost:
            self._sent.pop(name, None)  # so that the next `send` sends it again
        raise OSError(f"{lost[0]} was taken but is not there, of {len(lost)} such files")

    def _folder(self, step: int) -> Path:
        return checkpoints.folder_of(self._run_dir, step)

    def _run_files(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield the name, and (size, mtime in ns), of each file to copy that is not part of a checkpoint."""
        for path in sorted(self._run_dir.rglob("*")):
            name = path.relative_to(self._run_dir)
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
            self._stored.store.put_file(str(path), self._stored.place(name))
        except FileNotFoundError:
            if path.exists():
                raise  # the bucket is missing, not the file
            return 0
        return size

    def _send_step(self, step: int) -> None:
        """Send a checkpoint unless the store has it. Its manifest is sent last."""
        folder = self._folder(step)
        try:
            manifest = files.read_inside(folder / checkpoints.MANIFEST, self._run_dir).decode()
            # A received run directory may have links to files of this user, which must not be sent.
            files.require_plain(folder)
        except FileNotFoundError:
            return  # deleted meanwhile
        if self._sent_steps.get(step) == manifest:
            return
        place = f"checkpoints/{folder.name}/{checkpoints.MANIFEST}"
        remote_manifest = self._stored.read(place)
        if remote_manifest != manifest:
            # Another checkpoint of this step is no longer whole from here on.
            if remote_manifest is not None:
                self._stored.store.rm_file(self._stored.place(place))
            sizes = {}
            for path in sorted(folder.rglob("*")):
                if path.is_file() and path.name != checkpoints.MANIFEST:
                    name = f"checkpoints/{folder.name}/{path.relative_to(folder)}"
                    sizes[name] = self._put(path, name)
            if not (folder / checkpoints.MANIFEST).exists():
                return  # deleted meanwhile
            self._require_arrival(sizes)
            self._stored.write(place, manifest)
            _log.info("%s is at %s", folder.name, self._stored.address)
        self._sent_steps[step] = manifest

    def _send_best(self) -> None:
        """Write where `best` leads, once that checkpoint is in the store. Stores have no links."""
        link = self._run_dir / "checkpoints" / "best"
        if not link.is_symlink():
            return
        target = link.readlink().name
        if target != self._sent_best and step_of(target) in self._sent_steps:
            self._stored.write("checkpoints/best", target)
            self._sent_best = target

    def _forget_pruned(self, steps: Sequence[int]) -> None:
        """Delete steps in the store that were deleted here, but none that is newer than all of `steps`.

        Such a step may be all that is left of a run that was longer elsewhere.
        """
        if not steps:
            return
        config = json.loads((self._run_dir / RESOLVED).read_text())
        limit = int(config["training"]["save_total_limit"])
        # A step that was never on this machine goes when it would have gone on the machine that made it.
        oldest_kept = 0
        if len(steps) >= limit:
            oldest_kept = steps[-limit]
        for step in self._stored.steps():
            if step in steps or step >= steps[-1]:
                continue
            if step in self._sent_steps or step < oldest_kept:
                self._delete_step(step)

    def _delete_step(self, step: int) -> None:
        """Delete a checkpoint in the store, its manifest first, so that no half of it looks whole."""
        place = self._stored.place(f"checkpoints/{self._folder(step).name}")
        self._stored.store.rm_file(f"{place}/{checkpoints.MANIFEST}")
        self._stored.store.rm(place, recursive=True)
        self._sent_steps.pop(step, None)
