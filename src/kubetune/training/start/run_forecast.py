"""The forecast of a run, on its prepared data and the devices that its ranks have: made once, then kept with the run."""

from __future__ import annotations

import os

from kubetune.base import logs
from kubetune.config.resolved import resolved
from kubetune.distributed import process_group
from kubetune.plan.cost import price_line, time_line
from kubetune.plan.costs import (
    Costs,
    DataTotals,
    DeviceFacts,
    Facts,
    RunWeights,
    costs_of,
    digest,
    read_kept,
)
from kubetune.plan.plan import Plan
from kubetune.rundir import metrics
from kubetune.training.start.memory_budget import rank_memory
from kubetune.training.start.planning import planned_tokens
from kubetune.training.start.rank_start import RankStart
from kubetune.training.start.start_log import gpu_name


def forecast_run(start: RankStart) -> Costs:
    """Return the forecast that the last start of the run kept, or a new one. All ranks call it.

    It comes before the model, which is loaded by it.
    """
    kept = None
    plan = start.plan
    if start.world.is_main:
        kept = read_kept(metrics.read_events(start.run_dir))
    if kept is not None:
        # What shared beginnings save shows when the model is loaded. Until then it is as at the last start.
        plan = plan.model_copy(update={"saved_share": kept.facts.plan.saved_share})
    return settle(start, plan, kept)


def settle(start: RankStart, plan: Plan, kept: Costs | None) -> Costs:
    """Return `kept` on all ranks if it follows from the same facts, else a new forecast. Rank 0's plan counts."""
    config = start.config
    world = start.world
    # Ranks that go by different forecasts would load the model in different ways.
    own_bytes, _ = rank_memory(config.compute.memory, plan, world.device)
    least_bytes = min(process_group.gather(own_bytes, world))
    costs = kept
    if world.is_main:
        data = DataTotals(planned_tokens(plan, start.data), start.data.longest)
        facts = Facts(
            digest(resolved(config)), plan, data, DeviceFacts(gpu_name(world), least_bytes)
        )
        changed = [] if kept is None else facts.differing(kept.facts)
        if changed:
            logs.STEP.info("the forecast is made again, for another %s", ", ".join(changed))
        if kept is None or changed:
            models = RunWeights.of(config, os.environ)
            costs = costs_of(config, plan, data, facts.device, models)
    settled: Costs = process_group.broadcast(costs, world)
    return settled


def log_forecast(costs: Costs, device_hour: float | None) -> None:
    """Log hours and price, as far as they are known. `device_hour`: the price of a device and hour."""
    if costs.bill is None or costs.bill.hours is None:
        return
    logs.STEP.info("forecast for the steps: %s", time_line(costs.bill))
    price = price_line(costs.bill, device_hour)
    if price:
        logs.STEP.info("forecast of the price: %s", price)
