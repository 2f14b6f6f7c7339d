"""Train a whole run on one rank: build the model, resume where the run left off, train to the end, report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import transformers

from kubetune import errors
from kubetune.base import logs
from kubetune.batching.feed import Feed
from kubetune.config.schema import Config, TrainingConfig
from kubetune.data.prepared.identity import Check
from kubetune.data.prepared.prefix_rules import may_share_prefixes
from kubetune.data.prepared.prepare import Prepared
from kubetune.data.spec import DataSpec
from kubetune.distributed import process_group
from kubetune.distributed.process_group import World
from kubetune.models.acceleration import Workload
from kubetune.models.adapters import fp8, shared_input
from kubetune.models.learner import Learner
from kubetune.models.loading import check_positions, check_rows, choose_dtype
from kubetune.models.spec import ModelSpec
from kubetune.plan.plan import Plan
from kubetune.plan.rank_work import RankWork
from kubetune.rundir import heartbeat
from kubetune.rundir.checkpoints import State, load_state, tidy
from kubetune.scoring.judge import Judge
from kubetune.tasks.task import Task
from kubetune.training import loss_scale
from kubetune.training.final_report import report
from kubetune.training.judgement import measure_base, open_judge
from kubetune.training.loop import loop
from kubetune.training.movement import Movement
from kubetune.training.optimizer.adamw import FlatAdamW
from kubetune.training.optimizer.adamw_sharded import make_optimizer
from kubetune.training.rollouts.feed import RolloutFeed
from kubetune.training.rollouts.start import make_rollout_feed
from kubetune.training.run import Run
from kubetune.training.run_log import open_run_log
from kubetune.training.saving.checkpoint_copies import writes_in_background
from kubetune.training.saving.checkpoint_writers import writer_of
from kubetune.training.saving.checkpointer import Checkpointer
from kubetune.training.saving.resuming import newest, restore
from kubetune.training.start import preflight, reference, warm_up
from kubetune.training.start.facts import log_model, log_padding, record_start
from kubetune.training.start.feeding import make_feed
from kubetune.training.start.memory_budget import MemoryBudget
from kubetune.training.stop import StopRequest


def train(
    config: Config,
    plan: Plan,
    run_dir: Path,
    data: Prepared,
    task: Task,
    world: World,
    stop: StopRequest,
    base: Check | None = None,
) -> tuple[State, str]:
    """Train a run to its end. All ranks call it.

    `base`, on rank 0: the check of the files that the run is made from. Return the last state and, on rank 0, a remark
    on the run, mostly empty. Raise Preempted after a stop with a committed checkpoint, Diverged before a bad update,
    LostPeer if other ranks are gone.
    """
    # Losses of peers and shortages of memory may come up anywhere: a sharded model talks with other ranks in each layer.
    budget_of = partial(MemoryBudget, config, plan, world.device)
    with process_group.noticing_losses(), preflight.explaining_shortage(budget_of, world.rank):
        run = _build(config, plan, run_dir, data, task, world, stop, base)
        state = _restore(run)
        if world.is_main:
            record_start(run, state, run_dir)

        # Trials, which change no weight.
        if config.training.fp8:
            model = run.learner.model
            first_loss = partial(warm_up.loss_ahead, run, state)
            fp8.adopt(model, run.learner.kernels, world.device, first_loss)
        if config.training.preflight:
            preflight.rehearse(run, state)

        # Until here a stop ends the process at once. From here it is obeyed where nothing is lost.
        stop.defer()
        measure_base(run, state)
        with open_run_log(config, plan, run_dir, world, state) as run_log:
            with run.checkpointer, run.learner.undo:
                state = loop(run, state, run_log)
            run.movement.conclude()
            # Some trackers keep the report when the log closes.
            return state, report(config, plan, run_dir, world, data, state)


def end_alone(
    config: Config,
    plan: Plan,
    run_dir: Path,
    data: Prepared,
    world: World,
    base: Check | None,
) -> tuple[State, str]:
    """Do what is left after the last checkpoint of a run of several nodes, on rank 0, without the others or the model.

    Return as `train` does. Raise LostPeer if the checkpoint turns out to be damaged: then all have to train again.
    """
    folder = newest(run_dir, base)
    state = State()
    if folder is not None:
        state = load_state(folder)
    patience = config.training.early_stopping_patience
    if not state.is_last(plan.num_steps, evaluates=data.eval is not None, patience=patience):
        raise errors.LostPeer(
            f"the last checkpoint is damaged, so all nodes have to train again after step {state.step}. A Job does not "
            "start those again that ended with 0: then run `kubetune delete` and `kubetune submit`, which keep the results"
        )
    # An earlier start may have died between the checkpoint's commit and its links.
    tidy(run_dir, state, config.training.save_total_limit)
    with open_run_log(config, plan, run_dir, world, state):
        return state, report(config, plan, run_dir, world, data, state)


def _build(
    config: Config,
    plan: Plan,
    run_dir: Path,
    data: Prepared,
    task: Task,
    world: World,
    stop: StopRequest,
    base: Check | None,
) -> Run:
    """Build the model as it is before training, and everything else that the loop works with."""
    # What can be refused is refused before the weights are loaded, which may take minutes.
    best_metric = config.training.metric_for_best_model
    _require_metric(best_metric, config.metrics, config.evaluation.names, data)
    sources = DataSpec.of(config).splits.get("eval", ())
    judge = open_judge(config.evaluation, sources, data, world)
    check_rows(getattr(transformers, task.auto_class), config.model, data)

    heartbeat.beat("loading")
    logs.STEP.info("loading model %s", config.model.path)
    workload = _workload(RankWork.of(config, plan, data.longest), plan, data)
    learner = task.build(ModelSpec.of(config), config.training, world, workload)
    check_positions(learner.lm, data.longest)

    feed, plan = _feed(config, plan, run_dir, data, world, learner, stop, judge)
    if config.needs_reference:
        # By the model before training, so before a checkpoint is loaded into it.
        dtype = config.model.dtype
        share_prefixes = feed.share_prefixes
        reference.attach(
            learner, dtype, plan, data, world, run_dir, base, share_prefixes=share_prefixes
        )

    learner, optimizer = _with_optimizer(learner, config.training)
    log_model(learner, optimizer)
    log_padding(data.tokenizer, world)
    checkpointer = _checkpointer(config, run_dir, data, world, learner, optimizer, base)
    movement = Movement(learner.model, optimizer, world)
    return Run(
        config,
        plan,
        world,
        stop,
        task,
        learner,
        optimizer,
        feed,
        data,
        checkpointer,
        movement,
        judge,
    )


def _checkpointer(
    config: Config,
    run_dir: Path,
    data: Prepared,
    world: World,
    learner: Learner,
    optimizer: FlatAdamW,
    base: Check | None,
) -> Checkpointer:
    """Return what saves the run. Raise EnvironmentFault if the disk has no room for its checkpoints."""
    training = config.training
    background = writes_in_background(training.async_save, optimizer, world.device.type)
    keep = training.save_total_limit
    writer = writer_of(
        run_dir, world, learner.model, optimizer, data.tokenizer, keep, training.timeout_seconds
    )
    return Checkpointer(
        run_dir,
        world,
        learner.model,
        optimizer,
        writer,
        keep,
        labelled=config.classifies,
        # Slices differ in size, and all ranks must save in the same way.
        background=process_group.broadcast(background, world),
        # An adapter's checkpoint holds no code: that of the base is loaded with the base.
        brings_code=config.model.trust_remote_code and config.lora is None,
        base=base,
    )


def _require_metric(
    name: str, of_task: Sequence[str], of_evaluation: Sequence[str], data: Prepared
) -> None:
    """Raise ConfigError unless evaluations will have the metric that chooses the best checkpoint."""
    if data.eval is None:
        return
    if data.labels is not None:
        of_task = data.labels.metrics  # a classifier's metrics follow from its labels
    preflight.require_metric(name, [*of_task, *of_evaluation])


def _feed(
    config: Config,
    plan: Plan,
    run_dir: Path,
    data: Prepared,
    world: World,
    learner: Learner,
    stop: StopRequest,
    judge: Judge | None,
) -> tuple[Feed | RolloutFeed, Plan]:
    """Return the batches of the run: rows of the data, or answers that the model draws to their prompts."""
    if config.task == "grpo":
        # Answers go on behind their prompts.
        check_positions(learner.lm, data.longest + config.grpo.max_completion_length)
        drawn = make_rollout_feed(
            config, plan, data, world, learner, run_dir, lambda: stop.requested, judge
        )
        return drawn, plan
    may_share = may_share_prefixes(config.task, config.data, config.preference)
    return make_feed(plan, config.training.seed, data, world, learner, may_share=may_share)


def _workload(work: RankWork, plan: Plan, data: Prepared) -> Workload:
    # About as many as the whole run has: whether compiling pays depends on them.
    mean_tokens = data.train.lengths.mean()
    num_tokens = int(mean_tokens * plan.global_batch_size * plan.num_steps)
    return Workload(num_tokens, data.labels, work)


def _with_optimizer(learner: Learner, training: TrainingConfig) -> tuple[Learner, FlatAdamW]:
    """Return the learner, whose gradients are summed in the optimizer's buffers, and the optimizer."""
    optimizer = make_optimizer(learner.model, training)
    learner = replace(learner, gradient_sums=optimizer.collected)
    # Copies of weights that the forward pass uses have to follow the weights.
    optimizer.mirror(shared_input.copies(learner.model, optimizer.collected))
    return learner, optimizer


def _restore(run: Run) -> State:
    """Load the newest checkpoint and return its state, or the state before the first step if there is none."""
    first = State(
        data_fingerprint=run.data.fingerprint,
        global_batch_size=run.plan.global_batch_size,
        global_batch_tokens=run.plan.global_batch_tokens,
    )
    state = restore(run.checkpointer, run.config.training.resume, first)

    # The scale is part of a checkpoint's state.
    dtype = choose_dtype(run.config.model.dtype, run.world.device)
    if state.step == 0 and dtype == torch.float16:
        state = replace(state, loss_scale=loss_scale.FIRST)
    return state
