"""`training.parallelism: auto`: the way that needs the least talk between devices and fits them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kubetune.base.humanize import size
from kubetune.config.schema import Config
from kubetune.plan.costs import Costs, DataTotals, DeviceFacts, costs_of
from kubetune.plan.devices import device_bytes, gpu_here
from kubetune.plan.model_shapes import read_weights
from kubetune.plan.plan import Plan
from kubetune.plan.proposals import Run, Way, first_that_fits, parallelisms


def decide_parallelism(config: Config, plan: Plan, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return what `auto` is for a run, and why in a clause.

    It follows from the config, the sizes of the model and the memory of a device, never from the data, which are not
    prepared yet: rows count as long as they may be. Where nobody knows, it is what takes the least memory.
    """
    whole, in_parts = parallelisms(config.lora)
    if plan.world_size == 1:
        return whole, "there is one process"
    memory = device_bytes(config.compute, plan)
    if memory is None:
        key = "compute.memory" if plan.device == "cpu" else "compute.gpu_memory"
        return in_parts, f"the memory of a process is not known here ({key})"
    weights = read_weights(config.model.path, environ)

    def planned_costs(changed: Config, plan: Plan, memory: int) -> Costs:
        device = DeviceFacts(gpu_here(plan.device), memory)
        return costs_of(changed, plan, DataTotals(None, None), device, environ, weights)

    ways: Sequence[Way] = ()
    if weights is not None:
        ways = first_that_fits(Run(config, lambda _: plan, planned_costs), memory)
    if not ways:
        return in_parts, f"the sizes of {config.model.path} are not known before it is loaded"
    needs = []
    for way in ways:
        needs.append(f"{size(way.memory.peak_bytes)} with {way.config.training.parallelism}")
    text = f"a process has {size(memory)} and takes about {', '.join(needs)}"
    if not ways[-1].fits:
        text += ": neither fits"
    return ways[-1].config.training.parallelism, text
