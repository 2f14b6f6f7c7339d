"""Decide the dtype of a run without a GPU if `model.dtype` is auto: the first start chooses, the whole run keeps it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kubetune.base import logs
from kubetune.base.cpu import processor
from kubetune.rundir import metrics
from kubetune.rundir.throughput import last_start

if TYPE_CHECKING:
    from kubetune.distributed.process_group import World


def decide(
    dtype: str,
    run_dir: Path,
    world: World,
    width: int | None = None,
) -> str:
    """Return `model.dtype`, with `auto` replaced by what that means on this CPU. All ranks call it and agree.

    `width`: the model's hidden size, if it is known.
    """
    if world.device.type == "cuda":
        return dtype
    if dtype != "auto":
        remark = processor.slow_dtype(dtype, width)
        if remark is not None and world.is_main:
            logs.MODEL.warning("%s", remark)
        return dtype
    from kubetune.distributed import process_group

    # Ranks may run on machines with different CPUs, so one decides.
    chosen = None
    if world.is_main:
        chosen = _choose(run_dir, width)
    agreed: str = process_group.broadcast(chosen, world)
    return agreed


def as_trained(run_dir: Path, dtype: str) -> str:
    """Return `model.dtype` of a run, with `auto` replaced by what its start decided, if it had no GPU."""
    if dtype != "auto":
        return dtype
    return _kept(run_dir) or dtype


def _choose(run_dir: Path, width: int | None) -> str:
    # A resumed run continues in the same dtype, even on another machine.
    kept = _kept(run_dir)
    if kept is not None:
        logs.MODEL.info("model.dtype: auto -> %s, as this run began", kept)
        return kept
    chosen, reason = processor.dtype_for(width)
    logs.MODEL.info("model.dtype: auto -> %s, because %s", chosen, reason)
    return chosen


def _kept(run_dir: Path) -> str | None:
    """Return the dtype of the last start; None if there was none, or if it had a GPU."""
    start = last_start(metrics.read_events(run_dir))
    # What a GPU chose says nothing of a CPU.
    if start.get("device") != "CPU":
        return None
    dtype: str | None = start.get("dtype")
    return dtype
