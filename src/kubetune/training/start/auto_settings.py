"""Decide what settings that are `auto` mean on this machine: by the CPU, and by what `kubetune bench` measured.

A run keeps to its end what its first start decided.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kubetune.base import logs
from kubetune.config.schema import Config, ModelConfig, TrainingConfig
from kubetune.config.schema.agreement import not_in_fp8
from kubetune.distributed import process_group
from kubetune.distributed.process_group import World
from kubetune.kernels import pointwise
from kubetune.plan import measured
from kubetune.plan.model_shapes import read_weights
from kubetune.plan.plan import Plan
from kubetune.rundir import metrics
from kubetune.rundir.throughput import last_start
from kubetune.training.start import cpu_dtype
from kubetune.training.start.start_log import gpu_name


def decide(
    config: Config,
    plan: Plan,
    run_dir: Path,
    world: World,
    tokens: float,
    width: int | None = None,
) -> Config:
    """Return the config with `auto` replaced by what it means on this machine. All ranks call it and agree.

    `tokens`: of all steps. `width`: the model's hidden size, if it is known.
    """
    dtype = cpu_dtype.decide(config.model.dtype, run_dir, world, width)
    # Rank 0 decides for all: what was measured lies on its machine.
    chosen = None
    if world.is_main:
        chosen = _choose(config, plan, tokens, run_dir, world)
        chosen["parallelism"] = config.training.parallelism
    chosen = process_group.broadcast(chosen, world)

    # From here on nobody sees `auto`, so that nobody decides it a second time.
    changes = {"dtype": dtype, "attention": chosen["attention"]}
    model = config.model.model_copy(update=changes)
    changes = {"compile": chosen["compile"], "parallelism": chosen["parallelism"]}
    training = config.training.model_copy(update=changes)
    return config.model_copy(update={"model": model, "training": training})


def as_event(model: ModelConfig, training: TrainingConfig) -> dict[str, Any]:
    """Return the decisions as a start's event keeps them for the next start."""
    return {"attention": model.attention, "compile": training.compile}


def _choose(
    config: Config,
    plan: Plan,
    tokens: float,
    run_dir: Path,
    world: World,
) -> dict[str, Any]:
    """Return what `as_event` holds, with `auto` decided: by an earlier start, else by what was measured here."""
    asked = as_event(config.model, config.training)
    # A resumed run keeps what it began with: another kernel gives other last bits.
    begun = last_start(metrics.read_events(run_dir))
    if begun:
        return _as_begun(asked, begun)

    # What `kubetune bench` measured on this kind of device.
    known = measured.read(gpu_name(world))
    chosen = dict(asked)
    if asked["attention"] == "auto" and known.attention == "sdpa":
        chosen["attention"] = "sdpa"
    if asked["compile"] == "auto":
        # Whether compiling pays depends on the model's size, and on the tokens ahead.
        weights = read_weights(config.model.path, os.environ)
        if weights is not None:
            compiles = measured.compiles(
                config.task,
                config.training,
                known,
                weights.parameters,
                tokens,
                plan.device,
            )
            # What cannot be compiled here is left to `auto`, which then does without.
            if not compiles or pointwise.can_compile(world.device) is None:
                chosen["compile"] = compiles

    _log(asked, chosen, known)
    if known.fp8 and not config.training.fp8 and not not_in_fp8(config):
        logs.MODEL.info(
            "training.fp8: true would be faster here, by what was measured on %s", known.time[:10]
        )

    return chosen


def _as_begun(asked: Mapping[str, Any], begun: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with `auto` replaced by what the last start (`begun`) had."""
    chosen = dict(asked)
    for name, value in asked.items():
        if value == "auto":
            chosen[name] = begun.get(name, value)
    return chosen


def _log(
    asked: Mapping[str, Any],
    chosen: Mapping[str, Any],
    known: measured.Choices,
) -> None:
    """Log what was decided."""
    changed = []
    for name in asked:
        if chosen[name] != asked[name]:
            changed.append(f"{name} auto -> {str(chosen[name]).lower()}")
    if changed:
        logs.MODEL.info(
            "%s, because %s (measured on %s)",
            ", ".join(changed),
            known.why,
            known.time[:10],
        )
