"""Evaluation: every sample of every rank exactly once, at any world size."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from kubetune.data.feed import evaluation_batch, evaluation_batches
from kubetune.data.prepare import Rows
from kubetune.health import StopRequest
from kubetune.parallel import World, agree, sum_numbers
from kubetune.plan import Plan

BETWEEN_STOP_CHECKS = 16  # batches; asking all ranks costs a message


def evaluate(
    task: ModuleType, learner: Any, rows: Rows, plan: Plan, world: World, stop: StopRequest | None = None
) -> dict[str, float] | None:
    """The task's metrics over `rows`, equal on all ranks; None when a stop was asked for meanwhile."""
    shares = evaluation_batches(rows, plan, world, flat=learner.route.flat)
    mine, longest = shares[world.rank], max(len(share) for share in shares)
    sums = [0.0] * len(task.SUMS)
    learner.model.eval()
    try:
        for index in range(longest):
            if stop is not None and index % BETWEEN_STOP_CHECKS == 0 and agree(stop.requested, world):
                return None
            if index < len(mine):
                batch = evaluation_batch(rows, mine[index]).to(world.device)
                sums = [a + b for a, b in zip(sums, task.evaluate(learner, batch), strict=True)]
    finally:
        learner.model.train()
    metrics: dict[str, float] = task.metrics(tuple(sum_numbers(sums, world)))
    return metrics
