"""What is known of the answers of a micro-batch that the model drew itself, for the loss that learns from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kubetune.batching.extra_inputs import moved_tensors


@dataclass(frozen=True)
class DrawnAnswers:
    """Numbers of each answer and of each of its tokens, row after row, as the batch's labels are."""

    advantages: Tensor  # fp32 [rows]
    counts: Tensor  # int64 [rows] tokens of each answer
    sampled: Tensor  # fp32 [labels] log-probabilities as they were when the tokens were drawn
    # fp32 [labels] those that training gave before the first step that learns from the answers; None: it is this step
    old: Tensor | None = None
    reference: Tensor | None = None  # fp32 [labels] those of the model before training
    computed_labels: int = 1  # tokens of all answers of the step that go through the model
    divisor: int = 1  # of the step's loss

    def to(self, device: torch.device) -> DrawnAnswers:
        """Return a copy on a device."""
        moved: dict[str, Any] = moved_tensors(self, device)
        return replace(self, **moved)
