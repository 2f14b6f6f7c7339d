"""The parts of a run, as one value that is passed along."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kubetune.batching.feed import Feed
from kubetune.config.schema import EvaluationConfig, LoggingConfig, TrainingConfig
from kubetune.data.prepared.prepare import Prepared
from kubetune.distributed.process_group import World
from kubetune.models.learner import Learner
from kubetune.plan.plan import Plan
from kubetune.scoring.judge import Judge
from kubetune.tasks.task import Task
from kubetune.training.movement import Movement
from kubetune.training.optimizer.adamw import FlatAdamW
from kubetune.training.rollouts.rollout_feed import RolloutFeed
from kubetune.training.saving.checkpointer import Checkpointer
from kubetune.training.stop import StopRequest


@dataclass(frozen=True)
class Run:
    """Everything the training loop works with. Only the tensors of the model and the optimizer change."""

    training: TrainingConfig
    evaluation: EvaluationConfig
    logging: LoggingConfig
    dtype: torch.dtype  # of frozen weights and of the arithmetic
    plan: Plan
    world: World
    stop: StopRequest
    task: Task
    learner: Learner
    optimizer: FlatAdamW
    feed: Feed | RolloutFeed
    data: Prepared
    checkpointer: Checkpointer
    movement: Movement
    judge: Judge | None = None

    @property
    def rollouts(self) -> RolloutFeed | None:
        """The feed of a run that draws its answers; None if it learns from given ones."""
        return self.feed if isinstance(self.feed, RolloutFeed) else None
