"""Evaluation: every sample of every rank exactly once, at any world size."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from kubetune import checkpoint, errors, watchdog
from kubetune.config.load import read_config
from kubetune.config.schema import SourceConfig
from kubetune.data.feed import evaluation_batch, evaluation_batches
from kubetune.data.prepare import prepare
from kubetune.data.rows import Rows
from kubetune.health import StopRequest
from kubetune.parallel import World, agree, sum_numbers
from kubetune.plan import Plan, make_plan
from kubetune.tasks import task_module

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
            watchdog.beat("evaluation")
            if index < len(mine):
                batch = evaluation_batch(rows, mine[index]).to(world.device)
                sums = [a + b for a, b in zip(sums, task.evaluate(learner, batch), strict=True)]
    finally:
        learner.model.train()
    metrics: dict[str, float] = task.metrics(tuple(sum_numbers(sums, world)))
    return metrics


def evaluate_run(run_dir: Path, which: str, data: str | None = None) -> dict[str, float]:
    """The metrics of a run's checkpoint on its evaluation data, or on `data`.

    Raises ConfigError when the run has no evaluation data and none are given.
    """
    config = read_config(run_dir)
    if data is not None:
        sources = config.data.model_copy(update={"train": (SourceConfig(path=data),), "eval": None})
        config = config.model_copy(update={"data": sources})
    elif config.data.eval is None:
        raise errors.ConfigError(f"{run_dir} has no evaluation data; give some with --data")
    prepared = prepare(config)
    rows = prepared.train if data is not None else prepared.eval
    assert rows is not None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    task = task_module(config)
    learner = task.load(config, checkpoint.choose(run_dir, which), device)
    values = evaluate(task, learner, rows, make_plan(config, world_size=1), World(device=device))
    assert values is not None
    return values
