"""Build the model of a run as it is before training, and its optimizer."""

from __future__ import annotations

from dataclasses import replace

import transformers

from kubetune import errors
from kubetune.base import logs
from kubetune.config.schema import TrainingConfig
from kubetune.distributed import process_group
from kubetune.distributed.main_rank import raise_first
from kubetune.models.acceleration import Workload
from kubetune.models.adapters import shared_input
from kubetune.models.learner import Learner
from kubetune.models.loading import check_positions, check_rows
from kubetune.plan.rank_work import RankWork
from kubetune.rundir import heartbeat, metrics
from kubetune.scoring.rewards.model_sources import source_of
from kubetune.scoring.rewards.models import load_teacher
from kubetune.scoring.rewards.named_models import NamedModel
from kubetune.training.optimizer.adamw import FlatAdamW
from kubetune.training.optimizer.adamw_sharded import make_optimizer
from kubetune.training.start.rank_start import RankStart


def build_model(start: RankStart) -> Learner:
    """Load the model, made ready to train. Raise ConfigError, before its weights are read, for rows that do not fit."""
    model = start.model.model
    data = start.data
    check_rows(getattr(transformers, start.task.auto_class), model, data)

    heartbeat.beat("loading")
    logs.STEP.info("loading model %s", model.path)
    # About as many as the whole run has: whether compiling pays depends on them.
    mean_tokens = data.train.lengths.mean()
    num_tokens = int(mean_tokens * start.plan.global_batch_size * start.plan.num_steps)
    work = RankWork.of(start.config, start.plan, data.longest)
    workload = Workload(num_tokens, data.labels, work)
    learner = start.task.build(start.model, start.training, start.world, workload)
    check_positions(learner.lm, data.longest)
    return learner


def with_teacher(start: RankStart, learner: Learner) -> Learner:
    """Return the learner with the frozen model that it learns from. All ranks call it.

    Raise ConfigError or ModelError for a teacher that cannot be used, or has another vocabulary.
    """
    failure = None
    teacher = None
    try:
        teacher = _teacher(start, learner)
    except errors.KubetuneError as error:
        failure = error
    # A rank that raised here alone would leave the others waiting for it.
    raise_first(process_group.gather(failure, start.world))
    return replace(learner, teacher=teacher)


def _teacher(start: RankStart, learner: Learner) -> Learner:
    data = start.data
    named = NamedModel.of_distillation(start.model.distill)
    source = source_of(named, local_files_only=start.model.model.local_files_only)
    heartbeat.beat("loading")
    logs.STEP.info("loading the teacher %s", source.name)
    longest = data.longest
    if start.config.draws_answers:
        longest += start.model.grpo.max_completion_length
    teacher = load_teacher(source, data.tokenizer, start.world.device, longest)
    own = learner.lm.config.get_text_config().vocab_size
    others = teacher.lm.config.get_text_config().vocab_size
    if own != others:
        raise errors.ModelError(
            f"{named.key}: the teacher {source.name} gives {others:,} probabilities for each token, the model "
            f"{start.model.model.path} {own:,}; expected a teacher of the same vocabulary"
        )
    if start.world.is_main:
        metrics.record_event(start.run_dir, "teacher", name=source.name, digest=source.digest)
    return teacher


def with_optimizer(learner: Learner, training: TrainingConfig) -> tuple[Learner, FlatAdamW]:
    """Return the learner, whose gradients are summed in the optimizer's buffers, and the optimizer."""
    optimizer = make_optimizer(learner.model, training)
    learner = replace(learner, gradient_sums=optimizer.collected)
    # Copies of weights that the forward pass uses have to follow the weights.
    optimizer.mirror(shared_input.copies(learner.model, optimizer.collected))
    return learner, optimizer
