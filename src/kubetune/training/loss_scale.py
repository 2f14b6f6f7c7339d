"""The factor on the loss in fp16, without which small gradients would become 0.

It is halved after an overflow, and doubled after many good steps. bf16 and fp32 need none: their factor stays 1.
"""

from __future__ import annotations

from dataclasses import replace

from kubetune.base import logs
from kubetune.rundir.checkpoints import State
from kubetune.training.optimizer.adamw import FlatAdamW

# Powers of 2, so that scaling rounds nothing.
FIRST = 2.0**14
STEPS_TO_RAISE = 1000


def lowered(optimizer: FlatAdamW, state: State) -> State:
    """Clear the gradient after an overflow, and return the state in which to try the same step again."""
    optimizer.clear_gradient()
    logs.TRAIN.info(
        "step %d: fp16 overflow, loss scale %g -> %g",
        state.step + 1,
        state.loss_scale,
        state.loss_scale / 2,
    )
    return replace(state, loss_scale=state.loss_scale / 2, steps_since_overflow=0)


def raised(state: State) -> State:
    """Return the state after a good step: after enough of them the factor is doubled."""
    # 1 means that it is not used, in bf16 or fp32.
    if state.loss_scale == 1.0 or state.steps_since_overflow + 1 < STEPS_TO_RAISE:
        return replace(state, steps_since_overflow=state.steps_since_overflow + 1)
    return replace(state, loss_scale=state.loss_scale * 2, steps_since_overflow=0)
