"""Trials of a model on batches of the run before it learns from them: to compile what was planned or compare losses."""

from __future__ import annotations

import time
from functools import partial

from torch import Tensor

from kubetune.batching.batch import Batch
from kubetune.batching.feed import Work
from kubetune.models import compiled_layers
from kubetune.models.fsdp import is_sharded
from kubetune.rundir import heartbeat, metrics
from kubetune.rundir.checkpoints import State
from kubetune.training.run import Run


def compile_planned(run: Run, state: State) -> None:
    """Once, after the first step: use the compiled form of what is to be compiled.

    Kernels are laid out for the sizes they first meet, so these must be the same wherever a run goes on.
    """
    kernels, layers = run.learner.kernels, run.learner.compiled_layers
    if not (kernels.is_planned or (layers is not None and layers.is_planned)):
        return
    learn, began = partial(_learn_ahead, run, state), time.perf_counter()
    if kernels.is_planned:
        kernels.compile()
        learn()
    if layers is not None:
        may_leave = not is_sharded(run.learner.model)
        compiled_layers.warm_up(layers, learn, may_leave=may_leave)
    if run.world.is_main:
        seconds = time.perf_counter() - began
        metrics.record_event(run.checkpointer.run_dir, "compile", step=state.step, seconds=seconds)


def _learn_ahead(run: Run, state: State) -> tuple[float, float]:
    """Loss and norm of the gradient of the largest micro-batch, which is the same wherever a run goes on."""
    heartbeat.beat("compiling")
    work = largest(run)
    try:
        parts = [learn(run, state, batch, work) for batch in work.batches]
        return float(sum(parts)), run.optimizer.gradient_norm()
    finally:
        run.optimizer.clear_gradient()


def largest(run: Run) -> Work:
    """A step of one micro-batch about as large as the run's largest; all ranks call it."""
    batch = run.feed.largest().to(run.world.device)
    work = Work(
        [batch],
        batch.num_labels,
        labels=batch.num_labels,
        tokens=batch.num_tokens,
        samples=len(batch.samples),
    )
    return run.task.with_batch_totals(run.learner, work, run.world)


def learn(run: Run, state: State, batch: Batch, work: Work) -> Tensor:
    """Loss of a micro-batch of a step; its gradient is added to the parameters'."""
    return run.task.backward(run.learner, batch, state.loss_scale / max(work.divisor, 1)).reshape(
        -1
    )[0]


def loss_ahead(run: Run, state: State) -> float:
    """Loss of the model on the first micro-batches of the next step."""
    work = run.feed.step(min(state.step, run.plan.num_steps - 1))
    parts = [
        run.task.evaluate(run.learner, batch.to(run.world.device)) for batch in work.batches[:1]
    ]
    return float(run.task.metrics(run.learner, parts, run.world)["eval_loss"])
