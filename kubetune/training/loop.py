"""The training loop. One step: its batches, their gradient, one agreement of all ranks, one update.

What differs between tasks is the task's. What could be state follows from the step: to resume is to start at another.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import transformers

from kubetune import errors
from kubetune.base import logs
from kubetune.batching.batch import Batch
from kubetune.batching.feed import Work
from kubetune.config.naming import prefers_greater
from kubetune.config.schema import Config
from kubetune.data.prepared.identity import Check
from kubetune.data.prepared.order import mixed_seed
from kubetune.data.prepared.prepare import Prepared
from kubetune.distributed import process_group
from kubetune.distributed.process_group import World
from kubetune.kernels.dropout import seed
from kubetune.models.acceleration import Workload
from kubetune.models.adapters import fp8, shared_input
from kubetune.models.loading import check_positions, check_rows, choose_dtype
from kubetune.plan.plan import Plan, learning_rate_at
from kubetune.rundir import heartbeat
from kubetune.rundir.checkpoints import State
from kubetune.tasks.task import Task
from kubetune.training import finite, loss_scale, step_digest
from kubetune.training.checkpointer import Checkpointer
from kubetune.training.final_report import report
from kubetune.training.host_copies import writes_in_background
from kubetune.training.judgement import judge_weights, measure_base, open_judge
from kubetune.training.optimizer.adamw_sharded import make_optimizer
from kubetune.training.run import Run
from kubetune.training.run_log import RunLog, log_batch, open_run_log
from kubetune.training.start import preflight, reference, warm_up
from kubetune.training.start.facts import log_model, log_padding, record_start
from kubetune.training.start.feeding import make_feed
from kubetune.training.stop import StopRequest, is_pause_due


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
    """Build the model, go on where the run left off, train to the end, report it; all ranks call it.

    `base`, on rank 0: the check of what the run is made from. Raises Preempted after a stop with a committed
    checkpoint, Diverged before a bad update, LostPeer when left alone.
    """
    # A sharded model talks with the other ranks wherever it is used.
    with process_group.noticing_losses(), preflight.explaining_shortage(config, plan, world):
        run = _build(config, plan, run_dir, data, task, world, stop, base)
        first = State(
            data_fingerprint=data.fingerprint,
            global_batch_size=plan.global_batch_size,
            global_batch_tokens=plan.global_batch_tokens,
        )
        state = run.checkpointer.restore(config.training.resume, first)
        if state.step == 0 and choose_dtype(config.model.dtype, world.device) == torch.float16:
            state = replace(state, loss_scale=loss_scale.FIRST)
        if world.is_main:
            record_start(run, state, run_dir)
        if config.training.fp8:
            fp8.adopt(
                run.learner.model,
                run.learner.kernels,
                world.device,
                lambda: warm_up.loss_ahead(run, state),
            )
        if config.training.preflight:
            preflight.rehearse(run, state)
        stop.defer()
        measure_base(run, state)
        with open_run_log(config, plan, run_dir, world, state) as run_log:
            with run.checkpointer, run.learner.undo:
                state = loop(run, state, run_log)
            return state, report(
                config, plan, run_dir, world, data, state
            )  # some trackers keep it when they close


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
    """The model as it is before training, and all that the loop works with."""
    judge = open_judge(config, data, world)
    check_rows(getattr(transformers, task.auto_class), config, data)
    heartbeat.beat("loading")
    logs.STEP.info("loading model %s", config.model.path)
    learner = task.build(config, world, _workload(plan, data))
    check_positions(learner.lm, data.longest)
    feed, plan = make_feed(config, plan, data, world, learner)
    reference.attach(config, plan, learner, data, world, run_dir, base, shares=feed.shares)
    optimizer = make_optimizer(learner.model, config.training)
    learner = replace(learner, gradient_sums=optimizer.collected)
    optimizer.mirror(shared_input.copies(learner.model, optimizer.collected))
    log_model(learner, optimizer)
    log_padding(data.tokenizer, world)
    brings_code = config.model.trust_remote_code and config.lora is None
    checkpointer = Checkpointer(
        run_dir,
        world,
        learner.model,
        optimizer,
        data.tokenizer,
        config.training.save_total_limit,
        labelled=config.classifies,
        background=writes_in_background(config.training.async_save, optimizer),
        timeout_seconds=config.training.timeout_seconds,
        base=base,
        brings_code=brings_code,
    )
    checkpointer.require_room()
    return Run(config, plan, world, stop, task, learner, optimizer, feed, data, checkpointer, judge)


def _workload(plan: Plan, data: Prepared) -> Workload:
    total = int(data.train.lengths.mean() * plan.global_batch_size * plan.num_steps)
    return Workload(total, data.labels, plan, data.longest)


def loop(run: Run, state: State, run_log: RunLog) -> State:
    """From `state.step` to the last step, or until early stopping."""
    # A step may be stopped, killed, or left alone by its peers anywhere; its order makes that harmless:
    #   1. Every rank computes its share of the global batch, which follows from the step alone.
    #   2. One message tells all the same: the loss, whether anybody must stop, whose background save failed. From here
    #      all ranks take the same branches, so none waits in a collective that another will never enter.
    #   3. Gradients meet and are judged before weights move: what is ever saved has come from finite numbers.
    #   4. `state` counts the step when its update is done. Weights, optimizer and state of one step make a checkpoint.
    #   5. A stop is obeyed only after that, or within an evaluation, which the next start makes anew.
    plan, world, optimizer = run.plan, run.world, run.optimizer
    if state.step:
        state = _finish_step(
            run, state, run_log
        )  # a stop may have come between a step and its evaluation
    while state.step < plan.num_steps and not _is_patience_spent(run, state):
        if is_pause_due(
            run.config.training.pause_at_step, state, evaluates=run.data.eval is not None
        ):
            _stop(run, state, run_log, errors.Paused)
        if state.step:
            warm_up.compile_planned(run, state)
        heartbeat.beat("step", state.step)
        began = time.perf_counter()
        work = run.task.with_batch_totals(run.learner, run.feed.step(state.step), world)
        run.learner.begin_step(work, world, run.task.evaluate)
        found = [_backward(run, state, i, batch, work) for i, batch in enumerate(work.batches)]
        losses = [values[0] for values in found]
        computed = time.perf_counter() - began
        step_digest.record(world.rank, state.step, work.batches, losses, optimizer)
        measured, stopping, failing, ranks = _agree(run, found, computed)
        norm = optimizer.reduce_gradient(world) / state.loss_scale
        if state.loss_scale > 1.0 and not math.isfinite(norm):
            state = loss_scale.lowered(optimizer, state)
            continue
        loss = measured["loss"]
        parts = [(batch.samples, part) for batch, part in zip(work.batches, losses, strict=True)]
        finite.require_finite(
            loss, norm, state.step, parts, world, partial(finite.origin, run.data, run.config)
        )
        above = finite.steps_above_threshold(loss, state, run.config.training)
        optimizer.scale_gradient(1.0 / state.loss_scale, norm, run.config.training.max_grad_norm)
        optimizer.update(learning_rate_at(plan, state.step))
        seconds = time.perf_counter() - began
        state = replace(
            loss_scale.raised(state),
            step=state.step + 1,
            samples=state.samples + work.samples,
            tokens=state.tokens + work.tokens,
            trained_tokens=state.trained_tokens + work.labels,
            seconds=state.seconds + seconds,
            steps_above_threshold=above,
        )
        measured |= run.learner.routing.measured(world)
        run_log.step(state, work, measured, norm=norm, seconds=seconds, ranks=ranks)
        if failing:
            run.checkpointer.finish()
        if stopping:
            _stop(run, state, run_log)
        state = _finish_step(run, state, run_log)
    if _is_patience_spent(run, state):
        logs.STEP.info(
            "stopped early at step %d: %s did not improve on %.6g of step %s in %d evaluations",
            state.step, run.config.training.metric_for_best_model, state.best_value or 0.0, state.best_step,
            state.evaluations_without_improvement,
        )  # fmt: skip
    return state


def _backward(run: Run, state: State, micro: int, batch: Batch, work: Work) -> torch.Tensor:
    """Loss and metrics of one micro-batch `[1 + metrics]`, divided by the whole global batch's divisor; its gradient
    is added to the parameters'."""
    heartbeat.beat("micro-batch")
    run.learner.expect_backward(is_last=micro == len(work.batches) - 1)
    began = time.perf_counter()
    batch = batch.to(run.world.device)
    # Dropout depends on where we are, not on what ran before: a resumed run draws the same masks.
    seed(mixed_seed(run.config.training.seed, state.step, micro, run.world.rank), run.world.device)
    found = (
        run.task.backward(run.learner, batch, state.loss_scale / max(work.divisor, 1))
        / state.loss_scale
    )
    if logs.BATCH.isEnabledFor(10):
        log_batch(run.config, micro, len(work.batches), batch, float(found.reshape(-1)[0]), began)
    return found.reshape(-1)


def _agree(
    run: Run, found: Sequence[torch.Tensor], computed: float
) -> tuple[dict[str, float], bool, bool, list[float]]:
    """One small message: (loss and metrics of the global batch, whether any rank was asked to stop, whether a
    checkpoint in the background failed on any, seconds of each rank)."""
    names, rank_seconds = ("loss", *run.task.step_metrics), [0.0] * run.world.size
    rank_seconds[run.world.rank] = computed
    columns = torch.stack(list(found)).double().t().contiguous() if found else ()
    mine = (
        torch.stack([column.sum() for column in columns]).tolist() if found else [0.0] * len(names)
    )
    flags = [float(run.stop.requested), float(run.checkpointer.has_failed)]
    numbers = process_group.sum_numbers([*mine, *flags, *rank_seconds], run.world)
    stopping, failing, *ranks = numbers[len(names) :]
    return dict(zip(names, numbers, strict=False)), stopping > 0, failing > 0, ranks


def _stop(
    run: Run, state: State, run_log: RunLog, why: type[errors.Preempted] = errors.Preempted
) -> None:
    logs.STEP.info("asked to stop: saving step %d", state.step)
    run_log.sync()
    if state.saved_step < state.step:
        run.checkpointer.save(state)
    run.checkpointer.finish()
    raise why(state.step)


def _finish_step(run: Run, state: State, run_log: RunLog) -> State:
    """Work that is due after a step: an evaluation, then a checkpoint that knows its result."""
    # Called after each step and once where a run goes on, since a stop may have come in between: `evaluated_step` and
    # `saved_step`, which lie in the checkpoint, say what of it was done, so that nothing is done twice or left out.
    # A stop saves at once, before an evaluation that is due: then the step is saved once more when it is evaluated.
    heartbeat.beat("end of step", state.step)
    plan, last = run.plan, state.step == run.plan.num_steps
    is_unsaved = state.saved_step < state.step
    if (
        run.data.eval is not None
        and state.evaluated_step < state.step
        and (last or plan.is_eval_step(state.step))
    ):
        if state.step > 1:
            warm_up.compile_planned(
                run, state
            )  # a resumed run evaluates with what the uninterrupted one did
        began = time.perf_counter()
        values = judge_weights(run, state.step)
        if values is None:
            _stop(run, state, run_log)
        else:
            state = _judge(run, state, values)
            is_unsaved = True
            run_log.evaluation(
                state.step, values, state.best_step == state.step, time.perf_counter() - began
            )
    is_best = state.best_step == state.step
    # A loss that runs away must not push the last good checkpoint out.
    is_sound = plan.is_save_step(state.step) and not state.steps_above_threshold
    is_due = is_best or last or is_sound or _is_patience_spent(run, state)
    if is_due and is_unsaved:
        run_log.sync()
        run.learner.routing.write_load(run.checkpointer.run_dir, state.step, run.world)
        return run.checkpointer.save(state)
    return state


def _judge(run: Run, state: State, values: dict[str, float]) -> State:
    """State that knows this evaluation, and whether it is the best so far."""
    name = run.config.training.metric_for_best_model
    preflight.require_metric(name, values)
    greater = prefers_greater(run.config.training)
    value, best, state = values[name], state.best_value, replace(state, evaluated_step=state.step)
    if best is None or (value > best if greater else value < best):
        return replace(
            state, best_step=state.step, best_value=value, evaluations_without_improvement=0
        )
    return replace(state, evaluations_without_improvement=state.evaluations_without_improvement + 1)


def _is_patience_spent(run: Run, state: State) -> bool:
    patience = run.config.training.early_stopping_patience
    return patience is not None and state.evaluations_without_improvement >= patience
