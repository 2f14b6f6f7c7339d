"""Write the files of a checkpoint.

If every rank holds everything, rank 0 writes everything. A sharded model is cut over the ranks, and so are its
files. Two ranks, a model of two trained tensors, a `[2, 3]` and b `[5]`, of which FSDP cuts rows:

    buffers of the whole model    a a a a a a b b b b b          master, exp_avg, exp_avg_sq: 11 numbers each
    rank 0 holds                  a a a       b b b              optimizer-00001-of-00002, shards [0, 3) [6, 9)
    rank 1 holds                        a a a       b b          optimizer-00002-of-00002, shards [3, 6) [9, 11)

    1. rank 0 makes a folder without a name yet and tells all ranks where it is
    2. every rank writes its part, and all hear how it went
    3. rank 0 reads `master` out of all parts and writes model.safetensors, a piece at a time
    4. rank 0 writes the manifest, gives the folder its name by rename, moves the links and prunes

rundir/checkpoints knows folders and checksums, training/optimizer/shards the files of the parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from kubetune import errors
from kubetune.base import fault_injection, files
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.distributed import process_group
from kubetune.distributed.main_rank import raise_first
from kubetune.distributed.process_group import World
from kubetune.rundir import checkpoints, heartbeat
from kubetune.rundir.checkpoints import State
from kubetune.training.optimizer import shards
from kubetune.training.optimizer.adamw import FlatAdamW
from kubetune.training.saving.checkpoint_copies import Snapshot
from kubetune.training.saving.full_disk import CheckpointRoom, explained_full_disk, require_free


@dataclass(frozen=True)
class WholeWriter:
    """Writes checkpoints of a model that every rank holds whole: rank 0 alone writes them."""

    world: World
    tokenizer: Tokenizer
    room: CheckpointRoom

    def commit(self, run_dir: Path, state: State, snapshot: Snapshot) -> None:
        """Write a checkpoint, whole or not at all. `run_dir`: the run's, or that of a rehearsal."""
        if not self.world.is_main:
            return
        self.room.require(run_dir)

        def write(folder: Path) -> None:
            with explained_full_disk(folder):
                _write_model(folder, snapshot, self.tokenizer)
                save_file(snapshot.optimizer, folder / shards.OPTIMIZER)

        # If the other ranks are lost meanwhile, this checkpoint is still worth having.
        with heartbeat.busy_alone():
            checkpoints.commit(run_dir, state, write)


@dataclass(frozen=True)
class ShardedWriter:
    """Writes checkpoints of a sharded model, of which every rank writes its part."""

    world: World
    sharing: int  # ranks that a copy of the weights is cut over; those of the first copy write it
    tokenizer: Tokenizer
    room: CheckpointRoom
    group: process_group.Group  # of a thread's own, whose collectives must not mix with the loop's

    def commit(self, run_dir: Path, state: State, snapshot: Snapshot) -> None:
        """Write a checkpoint in the four steps that the top of this module shows. All ranks call it."""
        if not self.world.is_main:
            folder = process_group.broadcast(None, self.world, self.group)
            if folder is not None:
                self._write_part(folder, snapshot)
            return

        is_announced = False  # the other ranks know the folder

        def write(folder: Path) -> None:
            nonlocal is_announced
            is_announced = True
            process_group.broadcast(folder, self.world, self.group)
            self._write_part(folder, snapshot)
            with explained_full_disk(folder):
                _write_model(folder, snapshot, self.tokenizer)

        try:
            self.room.require(run_dir)
            checkpoints.commit(run_dir, state, write)
        finally:
            if not is_announced:
                # No folder was made, and the others wait for one.
                process_group.broadcast(None, self.world, self.group)

    def _write_part(self, folder: Path, snapshot: Snapshot) -> None:
        """Write this rank's shards. Raise on every rank an error that any rank had."""
        # Kept until all ranks have met: one that raised alone would leave the others waiting.
        failure: errors.KubetuneError | None = None
        path = folder / shards.part_name(self.world.rank, self.sharing)
        try:
            with files.explained_writes(path), explained_full_disk(folder):
                # Other copies have the same numbers.
                if self.world.rank < self.sharing:
                    shards.write_part(path, snapshot.optimizer, snapshot.shards)
                fault_injection.reach("commit.part")
        except errors.EnvironmentFault as error:
            failure = error
        raise_first(process_group.gather(failure, self.world, self.group))


def _write_model(folder: Path, snapshot: Snapshot, tokenizer: Tokenizer) -> None:
    """Write the model with its tokenizer."""
    assert snapshot.model is not None
    snapshot.model.write(folder)
    tokenizer.save(folder)
    # A kill here leaves a folder without a manifest, which the next start removes.
    fault_injection.reach("commit.weights")


def writer_of(
    run_dir: Path,
    world: World,
    model: Any,
    optimizer: FlatAdamW,
    tokenizer: Tokenizer,
    keep: int,
    timeout_seconds: float,
) -> WholeWriter | ShardedWriter:
    """Return what writes the checkpoints of a model. All ranks call it.

    `keep`: training.save_total_limit. `timeout_seconds`: of messages between ranks. Raise EnvironmentFault, before hours
    are spent, if the checkpoints still to come do not fit the disk.
    """
    # What a checkpoint holds: the optimizer's buffers, and the weights that are trained.
    tensors = list(optimizer.state().values())
    for parameter in model.parameters():
        if parameter.requires_grad:
            tensors.append(process_group.local(parameter))
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    is_whole = optimizer.size == optimizer.master.numel()
    if not is_whole:
        (all_bytes,) = process_group.sum_numbers([num_bytes], world)
        num_bytes = int(all_bytes) * optimizer.sharing // world.size

    # One more than are kept: the new one is complete before an old one is removed.
    missing = max(1, keep + 1 - len(checkpoints.steps(run_dir)))
    free = process_group.broadcast(files.free_bytes(run_dir), world)
    require_free(run_dir, missing, num_bytes, free)

    room = CheckpointRoom(run_dir, num_bytes)
    if is_whole:
        return WholeWriter(world, tokenizer, room)
    group = process_group.side_group(world, timeout_seconds)
    return ShardedWriter(world, optimizer.sharing, tokenizer, room, group)
