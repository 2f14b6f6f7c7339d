"""One step of AdamW on flat buffers, by torch's fused kernel or by plain operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# torch's fused kernel, without torch.optim.AdamW, whose import of torch._dynamo takes a second of a start. None if this
# version of torch has it no more: then `plain_step` does the same, in more passes over the buffers.
FUSED_STEP: Any = getattr(torch, "_fused_adamw_", None)


@dataclass(frozen=True)
class AdamSettings:
    """AdamW's constants, with the names of the config."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0


def plain_step(
    buffers: Sequence[Tensor],
    step: float,
    learning_rate: float,
    settings: AdamSettings,
    decay: float,
) -> None:
    """Make the AdamW step number `step`, counted from 1, on master, gradient, exp_avg and exp_avg_sq."""
    master, gradient, exp_avg, exp_avg_sq = buffers
    master.mul_(1 - learning_rate * decay)
    exp_avg.lerp_(gradient, 1 - settings.beta1)
    exp_avg_sq.mul_(settings.beta2).addcmul_(gradient, gradient, value=1 - settings.beta2)

    # Both moments began at zero. Without these corrections the first steps would be too short.
    size = learning_rate / (1 - settings.beta1**step)
    scale = math.sqrt(1 - settings.beta2**step)
    master.addcdiv_(exp_avg, exp_avg_sq.sqrt().div_(scale).add_(settings.epsilon), value=-size)


def move(
    buffers: Sequence[Tensor],
    step_count: Tensor,
    learning_rate: float,
    settings: AdamSettings,
    decay: float,
) -> None:
    """Make the step on parts of master, gradient, exp_avg and exp_avg_sq."""
    master, gradient, exp_avg, exp_avg_sq = buffers
    if not len(master):
        return
    if FUSED_STEP is None:
        plain_step(buffers, float(step_count), learning_rate, settings, decay)
        return
    FUSED_STEP(
        [master],
        [gradient],
        [exp_avg],
        [exp_avg_sq],
        [],
        [step_count],
        lr=learning_rate,
        beta1=settings.beta1,
        beta2=settings.beta2,
        weight_decay=decay,
        eps=settings.epsilon,
        amsgrad=False,
        maximize=False,
    )
