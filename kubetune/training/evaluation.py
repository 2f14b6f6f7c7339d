"""Evaluation: every sample of every rank exactly once, at any world size."""

from __future__ import annotations

from typing import Any

import numpy as np

from kubetune.batching.feed import batch_of, evaluation_batches
from kubetune.batching.image_batches import picture_reader
from kubetune.data.prepared.rows import Rows
from kubetune.distributed.process_group import World, agree, sum_numbers
from kubetune.models import fsdp
from kubetune.models.learner import Learner
from kubetune.models.padding_free import unwrap
from kubetune.plan.plan import Plan
from kubetune.rundir import heartbeat
from kubetune.tasks.task import Task
from kubetune.training.stop import StopRequest

BETWEEN_STOP_CHECKS = 16  # batches; asking all ranks costs a message


def evaluate(
    task: Task,
    learner: Learner,
    rows: Rows,
    plan: Plan,
    world: World,
    stop: StopRequest | None = None,
) -> dict[str, float] | None:
    """The task's metrics over `rows`, equal on all ranks; None when a stop was asked for meanwhile."""
    parts = collect(task, learner, rows, plan, world, stop)
    if parts is None:
        return None
    return measured(task, learner, rows, parts, world)


def measured(
    task: Task, learner: Learner, rows: Rows, parts: list[Any], world: World
) -> dict[str, float]:
    """The task's metrics from what `collect` found on all ranks, and `eval_loss/SOURCE` where sources are several."""
    metrics = task.metrics(learner, parts, world)
    if len(rows.names) < 2:
        return metrics
    samples, losses, labels = task.sample_losses(learner, parts)
    source, number = rows.source[samples], len(rows.names)
    mine = np.concatenate(
        [np.bincount(source, losses, number), np.bincount(source, labels, number)]
    )
    sums = sum_numbers(mine.tolist(), world)
    found = zip(rows.names, sums[:number], sums[number:], strict=True)
    by_source = {f"eval_loss/{name}": loss / count for name, loss, count in found if count}
    return metrics | by_source if len(by_source) > 1 else metrics


def rehearse(
    task: Task, learner: Learner, rows: Rows, plan: Plan, world: World
) -> dict[str, float]:
    """An evaluation of each rank's largest batch alone: what it takes, and whether it works."""
    parts = collect(task, learner, rows, plan, world, only_largest=True)
    assert parts is not None
    return measured(task, learner, rows, parts, world)


def collect(
    task: Task,
    learner: Learner,
    rows: Rows,
    plan: Plan,
    world: World,
    stop: StopRequest | None = None,
    *,
    only_largest: bool = False,
) -> list[Any] | None:
    """Findings of the task in each of this rank's batches of `rows`; None when a stop was asked for meanwhile."""
    even = fsdp.is_sharded(learner.model)
    shares = evaluation_batches(
        rows, plan, world, padding_free=learner.route.padding_free, even=even
    )
    if only_largest:
        shares = [
            sorted(share, key=lambda ids: -int(rows.lengths[ids].sum()))[:1] for share in shares
        ]
    mine, longest = shares[world.rank], max(len(share) for share in shares)
    parts, reader = [], picture_reader(rows)
    learner.model.eval()
    try:
        for index in range(longest):
            if (
                stop is not None
                and index % BETWEEN_STOP_CHECKS == 0
                and agree(stop.requested, world)
            ):
                return None
            heartbeat.beat("evaluation")
            if index < len(mine):
                batch = batch_of(rows, mine[index], reader).to(world.device)
                parts.append(task.evaluate(learner, batch))
    finally:
        fsdp.close(unwrap(learner.model))
        learner.model.train()
    return parts
