"""Put together what the loop works with."""

from __future__ import annotations

from dataclasses import replace

from kubetune.distributed import process_group
from kubetune.models.learner import Learner
from kubetune.models.loading import choose_dtype
from kubetune.plan.forecast import Forecast
from kubetune.training.judgement import open_judge, require_metric
from kubetune.training.movement import Movement
from kubetune.training.optimizer.adamw import FlatAdamW
from kubetune.training.reference.attached import attach
from kubetune.training.reference.teacher import with_teacher
from kubetune.training.run import Run
from kubetune.training.saving.checkpoint_copies import writes_in_background
from kubetune.training.saving.checkpoint_writers import writer_of
from kubetune.training.saving.checkpointer import Checkpointer
from kubetune.training.start.feeding import make_batches
from kubetune.training.start.model_parts import build_model, with_optimizer
from kubetune.training.start.rank_start import RankStart
from kubetune.training.start.start_log import log_model, log_padding


def build(start: RankStart, memory: Forecast | None) -> Run:
    """Build the model as it is before training, and everything else that the loop works with. All ranks call it.

    `memory`: what the run is expected to take.
    """
    # What can be refused is refused before the weights are loaded, which may take minutes.
    config = start.config
    data = start.data
    world = start.world
    if data.eval is not None:
        # A classifier's metrics follow from its labels.
        metrics = config.metrics if data.labels is None else data.labels.metrics
        names = [*metrics, *config.evaluation.names]
        require_metric(start.training.metric_for_best_model, names)
    judge = open_judge(config.evaluation, data.spec.splits.get("eval", ()), data, world)

    learner = build_model(start, memory)
    if config.task == "distill":
        learner = with_teacher(start, learner)
    dtype = choose_dtype(start.model.model.dtype, world.device)
    feed, plan = make_batches(start, learner, judge)
    start = replace(start, plan=plan)
    if config.needs_reference:
        # By the model before training, so before a checkpoint is loaded into it.
        attach(start, learner, dtype, share_prefixes=feed.share_prefixes)

    learner, optimizer = with_optimizer(learner, start.training)
    log_model(learner, optimizer)
    log_padding(data.tokenizer, world)
    return Run(
        start.training,
        config.evaluation,
        config.logging,
        dtype,
        plan,
        world,
        start.stop,
        start.task,
        learner,
        optimizer,
        feed,
        data,
        _checkpointer(start, learner, optimizer, labelled=config.classifies),
        Movement(learner.model, optimizer, world),
        judge,
    )


def _checkpointer(
    start: RankStart, learner: Learner, optimizer: FlatAdamW, *, labelled: bool
) -> Checkpointer:
    """Return what saves the run. Raise EnvironmentFault if the disk has no room for its checkpoints."""
    spec = start.model
    training = start.training
    world = start.world
    background = writes_in_background(training.async_save, optimizer, world.device.type)
    # Slices differ in size, and all ranks must save in the same way.
    background = process_group.broadcast(background, world)
    writer = writer_of(
        start.run_dir,
        world,
        learner.model,
        optimizer,
        start.data.tokenizer,
        training.save_total_limit,
        training.timeout_seconds,
    )
    return Checkpointer(
        start.run_dir,
        world,
        learner.model,
        optimizer,
        writer,
        training.save_total_limit,
        labelled=labelled,
        background=background,
        # An adapter's checkpoint holds no code: that of the base is loaded with the base.
        brings_code=spec.model.trust_remote_code and spec.lora is None,
        base=start.base,
    )
