"""`training.parallelism: auto`: the way that needs the least talk between devices and fits them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kubetune.base.humanize import size
from kubetune.config.schema import Config
from kubetune.plan.costs import DataTotals, DeviceFacts, costs_of
from kubetune.plan.devices import gpu_here
from kubetune.plan.model_shapes import Weights, read_weights
from kubetune.plan.plan import Plan
from kubetune.plan.proposals import parallelisms


class Choice(NamedTuple):
    """What `auto` is for a run, and why in a clause."""

    parallelism: str
    why: str
    is_known: bool = True  # False: the machine that runs it may know more


def decide_parallelism(
    config: Config,
    plan: Plan,
    memory: int | None,
    environ: Mapping[str, str],
    weights: Weights | None = None,
) -> Choice:
    """Return what `auto` is for a run whose processes have so many bytes each, None if nobody knows.

    It follows from the config, the sizes of the model and the memory of a device, never from the data, which are not
    prepared yet: rows count as long as they may be. Where nobody knows, it is what takes the least memory.
    `weights`: those of the model if they were read before.
    """
    whole, in_parts = parallelisms(config.lora)
    if plan.world_size == 1:
        return Choice(whole, "there is one process")
    if memory is None:
        key = "compute.memory" if plan.device == "cpu" else "compute.gpu_memory"
        return Choice(in_parts, f"the memory of a process is not known here ({key})", False)
    weights = weights or read_weights(config.model.path, environ)
    data = DataTotals(None, None)
    device = DeviceFacts(gpu_here(plan.device), memory)
    needs = []
    for parallelism in (whole, in_parts):
        training = config.training.model_copy(update={"parallelism": parallelism})
        changed = config.model_copy(update={"training": training})
        taken = costs_of(changed, plan, data, device, environ, weights).memory
        if taken is None:
            why = f"the sizes of {config.model.path} are not known before it is loaded"
            return Choice(in_parts, why, False)
        needs.append(f"{size(taken.peak_bytes)} with {parallelism}")
        why = f"a process has {size(memory)} and takes about {', '.join(needs)}"
        if taken.fits:
            return Choice(parallelism, why)
    return Choice(in_parts, f"{why}: neither fits")
