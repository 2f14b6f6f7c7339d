"""The training loop. One step: its batches, their gradient, one agreement of all ranks, one update.

What differs between tasks is in the task. Whatever could be state follows from the step's number instead, so resuming
a run is starting at another step.

A step may be stopped, killed, or left alone by its peers anywhere. Its order makes that harmless:
  1. Every rank computes its share of the global batch, which follows from the step's number alone.
  2. One message tells all ranks the same: the loss, whether any rank must stop, whose background save failed. From here
     all take the same branches, so none waits in a collective that another will never enter.
  3. Gradients are summed and judged before weights move: whatever is saved was made of finite numbers.
  4. `state` counts the step after its update. Weights, optimizer and state of one step make a checkpoint.
  5. A stop is obeyed only after that, or within an evaluation, which the next start repeats.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kubetune import errors
from kubetune.base import logs
from kubetune.batching.feed import Work
from kubetune.data.order import mixed_seed
from kubetune.distributed.process_group import sum_numbers
from kubetune.kernels.dropout import seed
from kubetune.plan.plan import learning_rate_at
from kubetune.rundir import heartbeat
from kubetune.rundir.checkpoints import State
from kubetune.training import end_of_step, finite, loss_scale, step_digest
from kubetune.training.run import Run
from kubetune.training.run_log import RunLog, log_batch
from kubetune.training.start import warm_up
from kubetune.training.stop import is_pause_due


@dataclass(frozen=True)
class Agreement:
    """What all ranks know about a step after their one message."""

    measured: dict[str, float]  # loss and the task's step_metrics over the global batch
    is_stopping: bool  # a rank was asked to stop
    has_failed_save: bool  # a checkpoint in the background failed on a rank
    rank_seconds: list[float]  # how long each rank computed before it waited for the others


def loop(run: Run, state: State, run_log: RunLog) -> State:
    """Train from `state.step` to the last step, or until patience is spent. Return the last state."""
    training = run.training
    evaluates = run.data.eval is not None
    if state.step:
        # A stop may have come between a step and its evaluation.
        state = end_of_step.finish(run, state, run_log)

    while state.step < run.plan.num_steps:
        if end_of_step.is_patience_spent(training, state):
            logs.STEP.log(
                logs.NOTICE,
                "stopped early at step %d: %s did not improve on %.6g of step %s in %d evaluations",
                state.step,
                training.metric_for_best_model,
                state.best_value or 0.0,
                state.best_step,
                state.evaluations_without_improvement,
            )
            break

        if is_pause_due(training.pause_at_step, state, evaluates=evaluates):
            end_of_step.stop(run, state, run_log, errors.Paused)

        # The first step does not wait for the compiler.
        if state.step:
            warm_up.compile_planned(run, state)
        state = _step(run, state, run_log)

    return state


def _step(run: Run, state: State, run_log: RunLog) -> State:
    """Make one step, with all that is due after it. An fp16 gradient that overflows only lowers the loss scale."""
    heartbeat.beat("step", state.step)
    began = time.perf_counter()

    # This rank's part of the gradient.
    work = run.feed.step(state.step)
    if work is None:
        # A stop was asked for while answers were drawn.
        end_of_step.stop(run, state, run_log)
    work = run.task.with_batch_totals(run.learner, work, run.world)
    run.learner.begin_step(work, run.world, run.task.evaluate)

    values = [_backward(run, state, micro, work) for micro in range(len(work.batches))]
    losses = [of_batch[0] for of_batch in values]
    computed = time.perf_counter() - began
    step_digest.record(run.world.rank, state.step, work.batches, losses, run.optimizer)

    # All ranks: agree, add up the gradient, and look at it before weights move.
    agreement = _agree(run, values, computed)
    if _is_dropped(agreement):
        end_of_step.stop(run, state, run_log)
    norm = run.optimizer.reduce_gradient(run.world) / state.loss_scale
    if state.loss_scale > 1.0 and not math.isfinite(norm):
        return loss_scale.lowered(run.optimizer, state)
    steps_above = _require_sound(run, state, work, losses, agreement.measured["loss"], norm)

    _update(run, state, work, norm)
    seconds = time.perf_counter() - began
    state = _counted(state, work, seconds, steps_above)

    # What is due after it: a line of the log, the error of a save, a stop, an evaluation or a checkpoint.
    measured = agreement.measured | work.measured
    measured |= run.learner.routing.measured(run.world)
    ranks = agreement.rank_seconds
    work = replace(work, seconds=work.seconds | run.learner.seconds)
    run_log.step(state, work, measured, norm=norm, seconds=seconds, ranks=ranks)
    if agreement.has_failed_save:
        run.checkpointer.finish()
    if agreement.is_stopping:
        end_of_step.stop(run, state, run_log)
    return end_of_step.finish(run, state, run_log)


def _is_dropped(agreement: Agreement) -> bool:
    """True if a stop came while a teacher on a server was waited for. No weight has moved, and the step is not whole."""
    return agreement.is_stopping and math.isnan(agreement.measured["loss"])


def _update(run: Run, state: State, work: Work, norm: float) -> None:
    """Move the weights by the gradient, whose norm without the loss scale is `norm`."""
    largest_norm = run.training.max_grad_norm
    run.optimizer.scale_gradient(1.0 / state.loss_scale, norm, largest_norm)
    learning_rate = learning_rate_at(run.plan, state.step)
    with run.movement.watching(norm, learning_rate, work.measured):
        run.optimizer.update(learning_rate)


def _counted(state: State, work: Work, seconds: float, steps_above_threshold: int) -> State:
    """Return the state after a step's update."""
    return replace(
        loss_scale.raised(state),
        step=state.step + 1,
        samples=state.samples + work.samples,
        tokens=state.tokens + work.tokens,
        trained_tokens=state.trained_tokens + work.labels,
        seconds=state.seconds + seconds,
        steps_above_threshold=steps_above_threshold,
    )


def _backward(run: Run, state: State, micro: int, work: Work) -> torch.Tensor:
    """Add the gradient of one micro-batch to the parameters'.

    Return its loss and metrics `[1 + metrics]`, divided by the divisor of the whole global batch.
    """
    heartbeat.beat("micro-batch")
    number = len(work.batches)
    is_last = micro == number - 1
    run.learner.expect_backward(is_last=is_last)
    began = time.perf_counter()
    device = run.world.device
    batch = work.batches[micro].to(device)

    # Dropout depends on the place in the run, not on what ran before: a resumed run draws the same masks.
    place = mixed_seed(run.training.seed, state.step, micro, run.world.rank)
    seed(place, device)

    # fp16 multiplies the loss by its scale, so that small gradients do not vanish. The numbers for the log are without it.
    scale = state.loss_scale / max(work.divisor, 1)
    values = run.task.backward(run.learner, batch, scale) / state.loss_scale
    values = values.reshape(-1)
    if logs.BATCH.isEnabledFor(logging.DEBUG):
        loss = float(values[0])
        log_batch(run.logging, micro, number, batch, loss, began)
    return values


def _agree(run: Run, values: Sequence[torch.Tensor], computed: float) -> Agreement:
    """Add up the loss and metrics of all ranks, and exchange what else they must know, in one small message."""
    # The message of each of two ranks, and their sum:
    #
    #               loss  metrics…  to stop  failed saves  seconds of rank 0  of rank 1
    #     rank 0    1.2   …         0        0             0.8                0
    #     rank 1    1.1   …         1        0             0                  0.9
    #     sum       2.3   …         1        0             0.8                0.9
    names = ("loss", *run.task.step_metrics)
    sums = [0.0] * len(names)
    if values:
        # In fp64, each column by itself, so that its sum does not depend on what else is measured.
        columns = torch.stack(list(values)).double().t().contiguous()
        sums_of_columns = [column.sum() for column in columns]
        # One copy from the device for all of them.
        sums = torch.stack(sums_of_columns).tolist()

    is_stopping = float(run.stop.requested)
    has_failed_save = float(run.checkpointer.has_failed)
    seconds = [0.0] * run.world.size
    seconds[run.world.rank] = computed

    message = [*sums, is_stopping, has_failed_save, *seconds]
    numbers = sum_numbers(message, run.world)
    num_stopping, num_failed, *rank_seconds = numbers[len(names) :]
    measured = dict(zip(names, numbers, strict=False))
    return Agreement(measured, num_stopping > 0, num_failed > 0, rank_seconds)


def _require_sound(
    run: Run,
    state: State,
    work: Work,
    losses: Sequence[torch.Tensor],
    loss: float,
    norm: float,
) -> int:
    """Raise Diverged if weights must not move. Return how many steps in a row were above the loss watchdog's threshold."""
    micro_losses = []
    for batch, micro_loss in zip(work.batches, losses, strict=True):
        micro_losses.append((batch.samples, micro_loss))

    finite.require_finite(loss, norm, state.step, micro_losses, run.world, run.data)
    return finite.steps_above_threshold(loss, state, run.training)
