"""Write the checkpoints of a run, and resume from them.

If every rank holds everything, rank 0 writes everything. A sharded model is cut over the ranks, and so are its
files. Two ranks, a model of two trained tensors, a `[2, 3]` and b `[5]`, of which FSDP cuts rows:

    buffers of the whole model    a a a a a a b b b b b          master, exp_avg, exp_avg_sq: 11 numbers each
    rank 0 holds                  a a a       b b b              optimizer-00001-of-00002, shards [0, 3) [6, 9)
    rank 1 holds                        a a a       b b          optimizer-00002-of-00002, shards [3, 6) [9, 11)

    1. rank 0 makes a folder without a name yet and tells all ranks where it is
    2. every rank writes its part, and all hear how it went
    3. rank 0 reads `master` out of all parts and writes model.safetensors, a piece at a time
    4. rank 0 writes the manifest, gives the folder its name by rename, moves the links and prunes

rundir/checkpoints knows folders and checksums, training/optimizer/shards the files of the parts; this file knows models
and optimizers.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from kubetune import errors
from kubetune.base import fault_injection, files, logs, whole_folder
from kubetune.base.humanize import pause
from kubetune.config import consent
from kubetune.data.prepared.identity import Check
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.distributed import process_group
from kubetune.distributed.main_rank import on_main, raise_first
from kubetune.distributed.process_group import World
from kubetune.rundir import checkpoints as checkpoint
from kubetune.rundir import heartbeat, metrics
from kubetune.rundir.checkpoints import State
from kubetune.training.checkpoint_copies import CheckpointCopies, Snapshot
from kubetune.training.full_disk import explained_full_disk, require_free
from kubetune.training.optimizer import shards
from kubetune.training.optimizer.adamw import FlatAdamW


@dataclass
class Checkpointer:
    """Saves and restores one run. All ranks call it."""

    run_dir: Path
    world: World
    model: Any
    optimizer: FlatAdamW
    tokenizer: Tokenizer
    keep: int  # training.save_total_limit
    labelled: bool = False  # the model is a classifier
    background: bool = False  # copy the tensors, and write the copies while the loop goes on
    brings_code: bool = False  # checkpoints hold code of the model, which runs when they are loaded
    timeout_seconds: float = 1800.0  # of messages between ranks
    base: Check | None = None  # on rank 0: what the run is made from, compared before resuming

    # The newest save: what writes it in the background, its state, and how long it kept the loop waiting.
    _writing: Future[errors.KubetuneError | None] | None = field(default=None, init=False)
    _state: State = field(default_factory=State, init=False)
    _stall_seconds: float = field(default=0.0, init=False)

    _bytes: int = field(default=0, init=False)  # of one checkpoint

    def __post_init__(self) -> None:
        # This rank holds everything, so rank 0 alone writes the checkpoint.
        self._is_whole = self.optimizer.size == self.optimizer.master.numel()
        self._group: process_group.Group = None
        if not self._is_whole:
            # A thread's collectives must not mix with the loop's, so it has a group of its own.
            self._group = process_group.side_group(self.world, self.timeout_seconds)
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
            is_whole=self._is_whole,
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
        name = checkpoint.folder_of(self.run_dir, step).name
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

            if not self._is_whole:
                self._commit_parts(run_dir, state, snapshot)
            elif self.world.is_main:
                self._require_place(run_dir)
                # If the other ranks are lost meanwhile, this checkpoint is still worth having.
                with heartbeat.busy_alone():
                    checkpoint.commit(run_dir, state, lambda folder: self._write(folder, snapshot))

            if self.world.is_main:
                checkpoint.tidy(run_dir, state, self.keep)

            if self.brings_code and self.world.is_main:
                # The user allowed this run to execute the code, which is the same in the checkpoint.
                folder = checkpoint.folder_of(run_dir, state.step)
                consent.allow([consent.of_folder(folder)])
        except errors.KubetuneError as error:
            # How large a checkpoint is helps somebody whose disk is full.
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in files.DISK_FULL:
                return errors.EnvironmentFault(f"{error}; a checkpoint takes {self._bytes:,} bytes")
            return error

        return None

    def _require_place(self, run_dir: Path) -> None:
        """Raise EnvironmentFault if there is no room for a checkpoint. Make the folder of a rehearsal.

        The run directory is not made: somebody who has removed it does not want it back.
        """
        require_free(run_dir, 1, self._bytes)
        if run_dir != self.run_dir:
            with files.explained_writes(run_dir):
                run_dir.parent.mkdir(exist_ok=True)
                run_dir.mkdir()

    def require_room(self) -> None:
        """Raise EnvironmentFault, before hours are spent, if the checkpoints still to come do not fit the disk."""
        # What `_write` will write: the optimizer's buffers, and the weights that are trained.
        tensors = list(self.optimizer.state().values())
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                tensors.append(process_group.local(parameter))
        self._bytes = sum(tensor.nbytes for tensor in tensors)
        if not self._is_whole:
            (all_bytes,) = process_group.sum_numbers([self._bytes], self.world)
            self._bytes = int(all_bytes)

        # One more than are kept: the new one is complete before an old one is removed.
        missing = max(1, self.keep + 1 - len(checkpoint.steps(self.run_dir)))
        free = process_group.broadcast(files.free_bytes(self.run_dir), self.world)
        require_free(self.run_dir, missing, self._bytes, free)

    def _write(self, folder: Path, snapshot: Snapshot) -> None:
        """Write a whole checkpoint into the folder."""
        with explained_full_disk(folder):
            self._write_model(folder, snapshot)
            save_file(snapshot.optimizer, folder / shards.OPTIMIZER)

    def _write_model(self, folder: Path, snapshot: Snapshot) -> None:
        """Write the model with its tokenizer."""
        assert snapshot.model is not None
        snapshot.model.write(folder)
        self.tokenizer.save(folder)
        # A kill here leaves a folder without a manifest, which the next start removes.
        fault_injection.reach("commit.weights")

    def _commit_parts(
        self,
        run_dir: Path,
        state: State,
        snapshot: Snapshot,
    ) -> None:
        """Write a checkpoint of a sharded model, in the four steps that the top of this module shows."""
        if not self.world.is_main:
            folder = process_group.broadcast(None, self.world, self._group)
            if folder is not None:
                self._write_part(folder, snapshot)
            return

        is_announced = False  # the other ranks know the folder

        def write(folder: Path) -> None:
            nonlocal is_announced
            is_announced = True
            process_group.broadcast(folder, self.world, self._group)
            self._write_part(folder, snapshot)
            with explained_full_disk(folder):
                self._write_model(folder, snapshot)

        try:
            self._require_place(run_dir)
            checkpoint.commit(run_dir, state, write)
        finally:
            if not is_announced:
                # No folder was made, and the others wait for one.
                process_group.broadcast(None, self.world, self._group)

    def _write_part(self, folder: Path, snapshot: Snapshot) -> None:
        """Write this rank's shards. Raise on every rank an error that any rank had."""
        # Kept until all ranks have met: one that raised alone would leave the others waiting.
        failure: errors.KubetuneError | None = None
        path = folder / shards.part_name(self.world.rank, self.world.size)
        try:
            with files.explained_writes(path), explained_full_disk(folder):
                shards.write_part(path, snapshot.optimizer, snapshot.shards)
                fault_injection.reach("commit.part")
        except errors.EnvironmentFault as error:
            failure = error
        raise_first(process_group.gather(failure, self.world, self._group))

    def restore(self, mode: str, first: State) -> State:
        """Load the newest whole checkpoint and return its state, or return `first` if there is none.

        `mode`: training.resume. `first`: the state before the first step, with the data and the global batch. Raises
        ConfigError if a checkpoint must or must not exist, or if it was made from other data.
        """
        folder = on_main(partial(newest, self.run_dir, self.base), self.world)
        if folder is None:
            if mode == "must":
                raise errors.ConfigError(
                    f"training.resume is must, but {self.run_dir} has no checkpoint"
                )
            return first

        if mode == "never":
            raise errors.ConfigError(
                f"training.resume is never, but {self.run_dir} has {folder.name}; choose another `output`"
            )

        # Other data, or another global batch, and the number of steps would stand for other samples.
        heartbeat.beat("resuming")
        state = checkpoint.load_state(folder)
        before = _batches_of(state)
        now = _batches_of(first)
        if before != now:
            raise errors.ConfigError(
                f"{folder} was made from {before}, this run has {now}: going on would repeat or skip samples. Choose "
                "another `output`, or put back what changed"
            )

        # Weights follow from the optimizer's buffers, so only these are read.
        try:
            with shards.Buffers(folder) as buffers:
                self.optimizer.load(buffers.state(self.optimizer.shards, self.optimizer.size))
        except SafetensorError as error:
            raise errors.ConfigError(
                f"{folder}: its optimizer state is no safetensors file ({error})"
            ) from error
        except ValueError as error:
            raise errors.ConfigError(
                f"{folder}: {error}; was `model` or `lora` changed since? Use another `output`"
            ) from error

        # An earlier start may have died between a checkpoint's commit and its links.
        if self.world.is_main:
            checkpoint.tidy(self.run_dir, state, self.keep)
        logs.STEP.info("resumed from %s", folder.name)
        return state


def newest(run_dir: Path, base: Check | None) -> Path | None:
    """Remove half-written checkpoints. Return the folder of the newest whole one, if it fits the run's base."""
    checkpoint.clean(run_dir)
    folder = checkpoint.find(run_dir)
    if folder is not None and base is not None:
        base.require_same()
    return folder


def _batches_of(state: State) -> str:
    """Return in words what decides which samples a step has."""
    sizes = f"global_batch_size {state.global_batch_size}"
    if state.global_batch_tokens:
        sizes = f"global_batch_tokens {state.global_batch_tokens}, {sizes}"
    return f"data {state.data_fingerprint} with {sizes}"
