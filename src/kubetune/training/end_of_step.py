"""Do what is due after a step: an evaluation, then a checkpoint that knows its result; and stop on request.

    step      9   10         11   12         save_steps: 4, eval_steps: 10, last step 12
    due       -   evaluate   -    evaluate
                  save*           save       * where the evaluation is the best so far

`evaluated_step` and `saved_step` are in the checkpoint and say what was done for its step, so that a resumed run does
nothing twice and leaves nothing out. A stop saves at once, before an evaluation that is due: the next start evaluates
that step first, and saves it again.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NoReturn

from kubetune import errors
from kubetune.base import logs
from kubetune.config.schema import TrainingConfig
from kubetune.rundir import heartbeat
from kubetune.rundir.checkpoints import State
from kubetune.training.judgement import judge_weights, require_metric
from kubetune.training.run import Run
from kubetune.training.run_log import RunLog
from kubetune.training.start import warm_up


def stop(
    run: Run,
    state: State,
    run_log: RunLog,
    reason: type[errors.Preempted] = errors.Preempted,
) -> NoReturn:
    """Save the step if it is not saved, and raise the error that ends the run."""
    logs.STEP.log(logs.NOTICE, "asked to stop: saving step %d", state.step)
    run_log.sync()  # a checkpoint must not be ahead of the numbers on disk
    if state.saved_step < state.step:
        run.checkpointer.save(state)
    run.checkpointer.finish()
    raise reason(state.step)


def finish(run: Run, state: State, run_log: RunLog) -> State:
    """Evaluate and save if that is due. Call it after each step, and once when a run is resumed."""
    heartbeat.beat("end of step", state.step)
    # First the evaluation, since its result decides whether this step is the best and is saved.
    is_last = state.step == run.plan.num_steps
    is_unsaved = state.saved_step < state.step
    is_evaluated = run.data.eval is None or state.evaluated_step == state.step
    if not is_evaluated and (is_last or run.plan.is_eval_step(state.step)):
        state = _evaluate(run, state, run_log)
        is_unsaved = True

    is_best = state.best_step == state.step
    # A loss that runs away must not push the last good checkpoint out.
    is_sound = run.plan.is_save_step(state.step) and not state.steps_above_threshold
    is_due = is_best or is_last or is_sound or is_patience_spent(run.training, state)
    if is_due and is_unsaved:
        run_log.sync()
        if run.world.is_main:
            run.learner.routing.load.write(run.checkpointer.run_dir, state.step)
        return run.checkpointer.save(state)

    return state


def is_patience_spent(training: TrainingConfig, state: State) -> bool:
    """True if so many evaluations in a row were no better that the run ends early."""
    patience = training.early_stopping_patience
    return patience is not None and state.evaluations_without_improvement >= patience


def _evaluate(run: Run, state: State, run_log: RunLog) -> State:
    if state.step > 1:
        # A resumed run evaluates with the compiled parts that the uninterrupted one evaluated with.
        warm_up.compile_planned(run, state)
    began = time.perf_counter()
    values = judge_weights(run, state.step)
    if values is None:
        stop(run, state, run_log)
    state = _judged(run.training, state, values)
    seconds = time.perf_counter() - began
    run_log.evaluation(
        state.step,
        values,
        state.best_step == state.step,
        seconds,
    )
    return state


def _judged(
    training: TrainingConfig,
    state: State,
    values: dict[str, float],
) -> State:
    """Return the state after an evaluation, with its step and value as the best if they are."""
    # The first evaluation is the best so far; later ones only if they are really better.
    name = training.metric_for_best_model
    require_metric(name, values)

    value = values[name]
    state = replace(state, evaluated_step=state.step)

    best = state.best_value
    if best is None:
        is_better = True
    elif training.prefers_greater:
        is_better = value > best
    else:
        is_better = value < best

    # A value that is as good is no improvement: the earlier checkpoint stays the best.
    if is_better:
        return replace(
            state,
            best_step=state.step,
            best_value=value,
            evaluations_without_improvement=0,
        )

    return replace(state, evaluations_without_improvement=state.evaluations_without_improvement + 1)
