"""Resume a run from its newest checkpoint."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from kubetune import errors
from kubetune.base import logs
from kubetune.data.prepared.identity import Check
from kubetune.distributed.main_rank import on_main
from kubetune.rundir import checkpoints, heartbeat
from kubetune.rundir.checkpoints import State
from kubetune.training import loss_scale
from kubetune.training.optimizer import shards
from kubetune.training.run import Run
from kubetune.training.saving.checkpointer import Checkpointer


def restore(run: Run) -> State:
    """Load the newest whole checkpoint and return its state, or the state before the first step if there is none.

    Raise ConfigError if a checkpoint must or must not exist (training.resume), or if it was made from other data.
    """
    first = State(
        data_fingerprint=run.data.fingerprint,
        global_batch_size=run.plan.global_batch_size,
        global_batch_tokens=run.plan.global_batch_tokens,
    )
    state = _restored(run.checkpointer, run.training.resume, first)
    # The scale is part of a checkpoint's state.
    if state.step == 0 and run.dtype == torch.float16:
        state = replace(state, loss_scale=loss_scale.FIRST)
    return state


def _restored(checkpointer: Checkpointer, mode: str, first: State) -> State:
    """Return the state of the newest checkpoint, or `first` if there is none."""
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
    logs.STEP.log(logs.NOTICE, "resumed from %s", folder.name)
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
