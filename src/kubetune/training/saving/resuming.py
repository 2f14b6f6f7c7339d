"""Resume a run from its newest checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from kubetune import errors
from kubetune.base import logs
from kubetune.data.prepared.identity import Check
from kubetune.distributed.main_rank import on_main
from kubetune.rundir import checkpoints, heartbeat
from kubetune.rundir.checkpoints import State
from kubetune.training.optimizer import shards
from kubetune.training.saving.checkpointer import Checkpointer


def restore(checkpointer: Checkpointer, mode: str, first: State) -> State:
    """Load the newest whole checkpoint and return its state, or return `first` if there is none.

    `mode`: training.resume. `first`: the state before the first step, with the data and the global batch. Raises
    ConfigError if a checkpoint must or must not exist, or if it was made from other data.
    """
    run_dir = checkpointer.run_dir
    folder = on_main(partial(newest, run_dir, checkpointer.base), checkpointer.world)
    if folder is None:
        if mode == "must":
            raise errors.ConfigError(f"training.resume is must, but {run_dir} has no checkpoint")
        return first

    if mode == "never":
        raise errors.ConfigError(
            f"training.resume is never, but {run_dir} has {folder.name}; choose another `output`"
        )

    # Other data, or another global batch, and the number of steps would stand for other samples.
    heartbeat.beat("resuming")
    state = checkpoints.load_state(folder)
    before = _batches_of(state)
    now = _batches_of(first)
    if before != now:
        raise errors.ConfigError(
            f"{folder} was made from {before}, this run has {now}: going on would repeat or skip samples. Choose "
            "another `output`, or put back what changed"
        )

    # Weights follow from the optimizer's buffers, so only these are read.
    optimizer = checkpointer.optimizer
    try:
        with shards.Buffers(folder) as buffers:
            optimizer.load(buffers.state(optimizer.shards, optimizer.size))
    except ValueError as error:
        raise errors.ConfigError(
            f"{folder}: {error}; was `model` or `lora` changed since? Use another `output`"
        ) from error

    # An earlier start may have died between a checkpoint's commit and its links.
    if checkpointer.world.is_main:
        checkpoints.tidy(run_dir, state, checkpointer.keep)
    logs.STEP.info("resumed from %s", folder.name)
    return state


def newest(run_dir: Path, base: Check | None) -> Path | None:
    """Remove half-written checkpoints. Return the folder of the newest whole one, if it fits the run's base."""
    checkpoints.clean(run_dir)
    folder = checkpoints.find(run_dir)
    if folder is not None and base is not None:
        base.require_same()
    return folder


def _batches_of(state: State) -> str:
    """Return in words what decides which samples a step has."""
    sizes = f"global_batch_size {state.global_batch_size}"
    if state.global_batch_tokens:
        sizes = f"global_batch_tokens {state.global_batch_tokens}, {sizes}"
    return f"data {state.data_fingerprint} with {sizes}"
