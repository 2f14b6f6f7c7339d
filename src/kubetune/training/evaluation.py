"""Evaluate a model on rows: each exactly once, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kubetune.batching.feed import batch_of, evaluation_batches
from kubetune.batching.image_batches import picture_reader
from kubetune.data.prepared.rows import Rows
from kubetune.distributed.process_group import World, agree, sum_numbers
from kubetune.models import fsdp
from kubetune.models.learner import Learner
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
    """Return the task's metrics over `rows`, the same on all ranks; None if a stop came meanwhile."""
    parts = collect(task, learner, rows, plan, world, stop)
    if parts is None:
        return None
    return measured(task, learner, rows, parts, world)


def measured(
    task: Task,
    learner: Learner,
    rows: Rows,
    parts: list[Any],
    world: World,
) -> dict[str, float]:
    """Return the task's metrics of what `collect` returned on each rank, the same on all ranks.

    If there are several sources, `eval_loss/SOURCE` of each is among the metrics.
    """
    metrics = task.metrics(learner, parts, world)
    number = len(rows.names)
    if number < 2:
        return metrics

    # Sums of losses and of labels of each source, over all ranks.
    samples, losses, labels = task.sample_losses(learner, parts)
    source = rows.source[samples]
    losses_by_source = np.bincount(source, losses, number)
    labels_by_source = np.bincount(source, labels, number)
    sums = sum_numbers([*losses_by_source.tolist(), *labels_by_source.tolist()], world)

    by_source = {}
    for index, name in enumerate(rows.names):
        # Losses come first in the sums, then labels. A source may have no rows in the evaluation.
        num_labels = sums[number + index]
        if num_labels:
            by_source[f"eval_loss/{name}"] = sums[index] / num_labels

    if len(by_source) > 1:
        metrics = metrics | by_source
    return metrics


def rehearse(
    task: Task,
    learner: Learner,
    rows: Rows,
    plan: Plan,
    world: World,
) -> dict[str, float]:
    """Evaluate only each rank's largest batch, to see that it works and how much memory it takes."""
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
    count: Callable[[int], None] | None = None,
) -> list[Any] | None:
    """Return what the task computed from each of this rank's batches of `rows`; None if a stop came meanwhile.

    `count` is called after each batch with the number of rows that this rank has evaluated.
    """
    # Each forward of a sharded model takes all ranks.
    even = fsdp.is_sharded(learner.model)
    shares = evaluation_batches(
        rows,
        plan,
        world,
        padding_free=learner.route.padding_free,
        even=even,
    )
    # A row of each rank, so that all of them take part in the trial.
    if only_largest:
        for batches in shares:
            batches.sort(key=lambda ids: -int(rows.lengths[ids].sum()))
            del batches[1:]

    # Every rank computes all shares by itself, so nothing is sent.
    share = shares[world.rank]
    longest = max(len(batches) for batches in shares)
    parts = []
    done = 0  # rows
    reader = picture_reader(rows)
    with learner.asked():
        # All ranks take as many turns as the longest share has batches, since asking for a stop takes all of them.
        for index in range(longest):
            is_time_to_ask = index % BETWEEN_STOP_CHECKS == 0
            if stop is not None and is_time_to_ask and agree(stop.requested, world):
                return None
            heartbeat.beat("evaluation")
            if index < len(share):
                batch = batch_of(rows, share[index], reader).to(world.device)
                parts.append(task.evaluate(learner, batch))
                done += len(share[index])
                if count is not None:
                    count(done)

    return parts
