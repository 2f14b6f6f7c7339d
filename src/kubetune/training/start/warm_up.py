"""Try a model on batches of the run without learning from them: to compile what was planned, or to compare losses.

No weight moves, and the gradient is cleared afterwards.
"""

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
    """Compile what is planned, once, after the first step.

    Kernels are laid out for the sizes that they meet first, so these must be the same wherever a run is resumed.
    """
    kernels = run.learner.kernels
    layers = run.learner.compiled_layers
    compiles_layers = layers is not None and layers.is_planned
    if not kernels.is_planned and not compiles_layers:
        return

    began = time.perf_counter()
    learn_ahead = partial(_learn_ahead, run, state)
    if kernels.is_planned:
        kernels.compile()
        learn_ahead()
    if layers is not None:
        # A stop may interrupt compiling, unless other ranks wait for this one within a layer.
        may_leave = not is_sharded(run.learner.model)
        compiled_layers.warm_up(layers, learn_ahead, may_leave=may_leave)
    if run.world.is_main:
        seconds = time.perf_counter() - began
        metrics.record_event(
            run.checkpointer.run_dir,
            "compile",
            step=state.step,
            seconds=seconds,
        )


def _learn_ahead(run: Run, state: State) -> tuple[float, float]:
    """Return the loss and the gradient's norm of the largest micro-batch, which every start of a run can make."""
    heartbeat.beat("compiling")
    # The largest one is the same at every start of a run, whatever its next step is.
    work = largest(run)
    try:
        losses = [learn(run, state, batch, work) for batch in work.batches]
        return float(sum(losses)), run.optimizer.gradient_norm()
    finally:
        # It must leave no trace in the next step.
        run.optimizer.clear_gradient()


def largest(run: Run) -> Work:
    """Return a step of one micro-batch about as large as the run's largest. All ranks call it."""
    batch = run.feed.largest().to(run.world.device)
    work = Work(
        [batch],
        divisor=batch.num_labels,
        labels=batch.num_labels,
        tokens=batch.num_tokens,
        samples=len(batch.samples),
    )
    return run.task.with_batch_totals(run.learner, work, run.world)


def learn(
    run: Run,
    state: State,
    batch: Batch,
    work: Work,
) -> Tensor:
    """Add the gradient of a micro-batch to the parameters'. Return its loss."""
    # As in a step: gradients add up to a mean over the whole global batch.
    scale = state.loss_scale / max(work.divisor, 1)
    values = run.task.backward(run.learner, batch, scale)  # the loss, then metrics
    return values.reshape(-1)[0]


def loss_ahead(run: Run, state: State) -> float:
    """Return the model's loss on the first micro-batches of the next step."""
    # A run that is resumed after its last step has no next one.
    work = run.feed.step(min(state.step, run.plan.num_steps - 1))
    assert work is not None, "only where answers are drawn a stop may come meanwhile"
    parts = []
    for batch in work.batches[:1]:
        parts.append(run.task.evaluate(run.learner, batch.to(run.world.device)))
    return float(run.task.metrics(run.learner, parts, run.world)["eval_loss"])
