"""Save the checkpoints of a run: between two steps, or in a thread while the loop goes on.

The loop's thread takes a snapshot (checkpoint_copies.py), a writer makes files of it (checkpoint_writers.py), and all
ranks raise an error that any of them had. rundir/checkpoints knows folders and checksums.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base import files, logs, whole_folder
from kubetune.base.humanize import pause
from kubetune.config import consent
from kubetune.data.prepared.identity import Check
from kubetune.distributed import process_group
from kubetune.distributed.main_rank import raise_first
from kubetune.distributed.process_group import World
from kubetune.rundir import checkpoints, heartbeat, metrics
from kubetune.rundir.checkpoints import State
from kubetune.training.optimizer.adamw import FlatAdamW
from kubetune.training.saving.checkpoint_copies import CheckpointCopies, Snapshot
from kubetune.training.saving.checkpoint_writers import ShardedWriter, WholeWriter


@dataclass
class Checkpointer:
    """Saves one run. All ranks call it."""

    run_dir: Path
    world: World
    model: Any
    optimizer: FlatAdamW
    writer: WholeWriter | ShardedWriter
    keep: int  # training.save_total_limit
    labelled: bool = False  # the model is a classifier
    background: bool = False  # copy the tensors, and write the copies while the loop goes on
    brings_code: bool = False  # checkpoints hold code of the model, which runs when they are loaded
    base: Check | None = None  # on rank 0: what the run is made from

    # The newest save: what writes it in the background, its state, and how long it kept the loop waiting.
    _writing: Future[errors.KubetuneError | None] | None = field(default=None, init=False)
    _state: State = field(default_factory=State, init=False)
    _stall_seconds: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._copies = CheckpointCopies(background=self.background)
        # One thread, so that one checkpoint is written after the other.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Wait for what is being written, also after an error that all ranks have raised."""
        if error is None:
            self.finish()
            return
        # If other ranks are gone, a thread that waits for them would never end.
        agrees = isinstance(error, errors.KubetuneError) and not isinstance(error, errors.LostPeer)
        if agrees and self._writing is not None:
            self._writing.result()

    def save(self, state: State) -> State:
        """Commit a checkpoint of this state, move the links, prune. Return the state with its `saved_step`.

        When this returns the checkpoint is durable or, in the background, copied. One is written at a time.
        """
        self.finish()
        heartbeat.beat("save", state.step)
        began = time.perf_counter()
        state = replace(state, saved_step=state.step)
        self._state = state

        snapshot = self._snapshot()
        if self.background:
            self._writing = self._thread.submit(
                self._attempt,
                self.run_dir,
                state,
                snapshot,
            )
            self._stall_seconds = time.perf_counter() - began
        else:
            failure = self._attempt(self.run_dir, state, snapshot)
            self._stall_seconds = time.perf_counter() - began
            self._settle(failure)

        return state

    def rehearse(self, state: State) -> int:
        """Write a checkpoint as `save` does, and remove it. Return its bytes.

        If this is killed, the next start removes it, as it does with half-written checkpoints.
        """
        sibling = files.temporary_sibling(self.run_dir / "checkpoints" / "preflight")
        rehearsal_dir = process_group.broadcast(sibling, self.world)
        try:
            self._require_all(self._attempt(rehearsal_dir, state, self._snapshot()))
            # Links to the checkpoint would count its files twice.
            sizes = []
            for path in (rehearsal_dir / "checkpoints").rglob("*"):
                if path.is_file() and not path.is_symlink():
                    sizes.append(path.stat().st_size)
            return sum(sizes)
        finally:
            # No rank may still write into the folder when it is removed.
            process_group.barrier(self.world)
            if self.world.is_main and rehearsal_dir.exists():
                whole_folder.remove(rehearsal_dir)

    @property
    def has_failed(self) -> bool:
        """True if the checkpoint in the background is known to have failed. `finish` then raises the reason."""
        if self._writing is None or not self._writing.done():
            return False
        return self._writing.result() is not None

    def finish(self) -> None:
        """Wait for the checkpoint in the background, if there is one. Raise the error that it ended with."""
        if self._writing is None:
            return
        heartbeat.beat("save")
        began = time.perf_counter()
        failure = self._writing.result()
        self._stall_seconds += time.perf_counter() - began
        self._writing = None
        self._settle(failure)

    def _snapshot(self) -> Snapshot:
        """Return what this rank writes: with copies if a thread writes it."""
        return self._copies.take(
            self.model,
            self.optimizer,
            is_whole=isinstance(self.writer, WholeWriter),
            labelled=self.labelled,
            is_main=self.world.is_main,
        )

    def _require_all(self, failure: errors.KubetuneError | None) -> None:
        """Raise on every rank an error that any rank had."""
        if isinstance(failure, errors.LostPeer):
            raise failure  # asking the same ranks again would only take as long once more
        # A rank that did not know would go on, and wait in the next collective for a rank 0 that has ended.
        raise_first(process_group.gather(failure, self.world))

    def _settle(self, failure: errors.KubetuneError | None) -> None:
        """Raise on every rank an error that any rank had, or log that the checkpoint is saved."""
        self._require_all(failure)
        step = self._state.step
        seconds = self._stall_seconds
        name = checkpoints.folder_of(self.run_dir, step).name
        logs.STEP.info("saved checkpoint %s%s", name, pause(seconds))
        if self.world.is_main:
            metrics.record_event(
                self.run_dir,
                "save",
                step=step,
                seconds=seconds,
            )

    def _attempt(
        self,
        run_dir: Path,
        state: State,
        snapshot: Snapshot,
    ) -> errors.KubetuneError | None:
        """Write, commit and tidy up. Return the error rather than raise it, for `_require_all`.

        A thread may call this while the loop goes on, so it uses neither model nor optimizer, only the snapshot.
        `run_dir`: the run's, or that of a rehearsal.
        """
        try:
            # First, so that no checkpoint is without the identity of its base.
            if self.base is not None:
                self.base.record()
            self.writer.commit(run_dir, state, snapshot)
            if self.world.is_main:
                checkpoints.tidy(run_dir, state, self.keep)

            if self.brings_code and self.world.is_main:
                # The user allowed this run to execute the code, which is the same in the checkpoint.
                folder = checkpoints.folder_of(run_dir, state.step)
                consent.allow([consent.of_folder(folder)])
        except errors.KubetuneError as error:
            return self.writer.room.explained(error)

        return None
