"""Build the model of a run as it is before training, and its optimizer."""

from __future__ import annotations

from dataclasses import replace

import transformers

from kubetune.base import logs
from kubetune.config.schema import TrainingConfig
from kubetune.models.acceleration import Workload
from kubetune.models.adapters import shared_input
from kubetune.models.learner import Learner
from kubetune.models.loading import check_positions, check_rows
from kubetune.plan.forecast import Forecast
from kubetune.rundir import heartbeat
from kubetune.training.optimizer.adamw import FlatAdamW
from kubetune.training.optimizer.adamw_sharded import make_optimizer
from kubetune.training.start.rank_start import RankStart


def build_model(start: RankStart, memory: Forecast | None) -> Learner:
    """Load the model, made ready to train. Raise ConfigError, before its weights are read, for rows that do not fit.

    `memory`: what the run is expected to take.
    """
    model = start.model.model
    data = start.data
    check_rows(getattr(transformers, start.task.auto_class), model, data)

    heartbeat.beat("loading")
    logs.STEP.info("loading model %s", model.path)
    # About as many as the whole run has: whether compiling pays depends on them.
    mean_tokens = data.train.lengths.mean()
    num_tokens = int(mean_tokens * start.plan.global_batch_size * start.plan.num_steps)
    workload = Workload(num_tokens, data.labels, memory)
    learner = start.task.build(start.model, start.training, start.world, workload)
    check_positions(learner.lm, data.longest)
    return learner


def with_optimizer(learner: Learner, training: TrainingConfig) -> tuple[Learner, FlatAdamW]:
    """Return the learner, whose gradients are summed in the optimizer's buffers, and the optimizer."""
    optimizer = make_optimizer(learner.model, training)
    learner = replace(learner, gradient_sums=optimizer.collected)
    # Copies of weights that the forward pass uses have to follow the weights.
    optimizer.mirror(shared_input.copies(learner.model, optimizer.collected))
    return learner, optimizer
