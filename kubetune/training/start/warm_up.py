"""Trials of a model on batches of the run before it learns from them: to compile what was planned or compare losses."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from kubetune.batching.batch import Batch
from kubetune.batching.feed import Work
from kubetune.models import compiled_layers
from kubetune.rundir import heartbeat
from kubetune.rundir.checkpoints import State
from kubetune.training.run import Run


def compile_planned(run: Run, state: State) -> None:
    """Once, after the first step: use the compiled form of what is to be compiled.

    Kernels are laid out for the sizes they first meet, so these must be the same wherever a run goes on.
    """
    learn = partial(_learn_ahead, run, state)
    if run.learner.kernels.is_planned:
        run.learner.kernels.compile()
        learn()
    if run.learner.compiled_layers is not None:
        compiled_layers.warm_up(run.learner.compiled_layers, learn)


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
    work = Work([batch], batch.num_labels, labels=batch.num_labels, tokens=batch.num_tokens, samples=len(batch.samples))
    return run.task.completed(run.learner, work, run.world)


def learn(run: Run, state: State, batch: Batch, work: Work) -> Tensor:
    """Loss of a micro-batch of a step; its gradient is added to the parameters'."""
    return run.task.backward(run.learner, batch, state.loss_scale / max(work.divisor, 1)).reshape(-1)[0]


def loss_ahead(run: Run, state: State) -> float:
    """Loss of the model on the first micro-batches of the next step."""
    work = run.feed.step(min(state.step, run.plan.num_steps - 1))
    parts = [run.task.evaluate(run.learner, batch.to(run.world.device)) for batch in work.batches[:1]]
    return float(run.task.metrics(run.learner, parts, run.world)["eval_loss"])
