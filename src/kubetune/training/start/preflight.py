"""Rehearse a run before its first step (`training.preflight`): its longest batch, an evaluation and a save.

What would fail after hours fails now: too little memory, a metric that the task does not have, a folder that cannot be
written. Nothing of it remains: no weight moves, the gradient is cleared, the loop seeds every micro-batch anew, and a
checkpoint that a kill leaves behind lies where the next start clears it away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kubetune.base import logs
from kubetune.base.humanize import counted, size
from kubetune.distributed import process_group
from kubetune.rundir import heartbeat, metrics
from kubetune.scoring import asking
from kubetune.training import evaluation
from kubetune.training.judgement import require_metric
from kubetune.training.peak_memory import peak_memory_bytes
from kubetune.training.start import warm_up
from kubetune.training.start.memory_budget import MemoryBudget
from kubetune.training.start.memory_trials import Trials

if TYPE_CHECKING:
    from kubetune.batching.batch import Batch
    from kubetune.batching.feed import Work
    from kubetune.rundir.checkpoints import State
    from kubetune.training.run import Run


def rehearse(run: Run, state: State, budget: MemoryBudget) -> None:
    """Try what the run will do, and log how much memory it took. All ranks call it.

    Raise OutOfMemory if it does not fit, with the changes that would make it fit.
    """
    if state.step:
        logs.STEP.info(
            "no preflight: this start goes on from step %d, and what was tried then has worked",
            state.step,
        )
        return

    # Log the forecast first: if the kernel kills this process, that is the last line.
    device = run.world.device
    work = warm_up.largest(run)
    batch = work.batches[0]
    num_rows = len(batch.cu_seqlens) - 1
    content = f"{counted(num_rows, 'row')}, {batch.num_tokens:,} tokens"
    logs.STEP.info(
        "preflight: the longest batch (%s), an evaluation, a save; forecast: %s",
        content, budget.outlook(),
    )  # fmt: skip

    trials = Trials(run.learner, run.world, budget)
    with trials.trial("batch", f"the longest batch ({content})"):
        _learn(run, state, batch, work)
    # Buffers for messages between ranks are allocated when they are first used.
    run.optimizer.reduce_gradient(run.world)
    run.optimizer.clear_gradient()
    if run.data.eval is not None:
        _evaluate(run, trials)

    heartbeat.beat("preflight of a save")
    with trials.trial("save", "a save"):
        checkpoint_bytes = run.checkpointer.rehearse(state)

    # The largest of all ranks, so that all take the same decision.
    peak = max(process_group.gather(peak_memory_bytes(device), run.world))
    reserved = None
    if device.type == "cuda":
        reserved = max(process_group.gather(torch.cuda.max_memory_reserved(device), run.world))

    budget.require(peak, content)
    if run.world.is_main:
        _report(run, trials, batch, peak, reserved, checkpoint_bytes)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # the run's own peak may be lower


def _report(
    run: Run,
    trials: Trials,
    batch: Batch,
    peak: int,
    reserved: int | None,
    checkpoint_bytes: int,
) -> None:
    """Log what was measured, and record it as an event."""
    budget = trials.budget
    logs.RESULT.info("preflight: %s", budget.verdict(peak, reserved))
    durations = [f"{name} {value:.2g} s" for name, value in trials.seconds.items()]
    logs.RESULT.info(
        "preflight: %s; a checkpoint has %s; nothing of it was kept",
        ", ".join(durations), size(checkpoint_bytes),
    )  # fmt: skip
    metrics.record_event(
        run.checkpointer.run_dir,
        "preflight",
        rows=len(batch.cu_seqlens) - 1,
        tokens=batch.num_tokens,
        forecast_bytes=budget.forecast_bytes,
        measured_bytes=peak,
        reserved_bytes=reserved,
        device_bytes=budget.device_bytes,
        checkpoint_bytes=checkpoint_bytes,
        seconds=trials.seconds,
    )


def _learn(
    run: Run,
    state: State,
    batch: Batch,
    work: Work,
) -> None:
    """Compute the gradient of a batch, twice if steps have several: the second needs memory beside the first's gradient."""
    heartbeat.beat("preflight of a batch")
    times = 2 if run.plan.may_accumulate else 1
    for micro in range(times):
        run.learner.expect_backward(is_last=micro == times - 1)
        warm_up.learn(run, state, batch, work)


def _evaluate(run: Run, trials: Trials) -> None:
    """Evaluate one batch, answer the longest questions, and require the metric that chooses the best checkpoint."""
    assert run.data.eval is not None
    with trials.trial("evaluation", "the longest batch of an evaluation"):
        values = evaluation.rehearse(
            run.task,
            run.learner,
            run.data.eval,
            run.plan,
            run.world,
        )

    if run.judge is not None:
        num_tokens = run.judge.wanted.max_new_tokens
        with trials.trial("answers", f"{num_tokens} new tokens for each of the longest questions"):
            asking.rehearse(run.judge, run.learner, run.world)

    # A run must not train for hours to find that its best checkpoint cannot be chosen.
    names = {*values, *run.evaluation.names}
    require_metric(run.training.metric_for_best_model, names)
