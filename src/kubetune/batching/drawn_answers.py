"""What is known of the answers of a micro-batch that the model drew itself, for the loss that learns from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kubetune.batching.extra_inputs import moved_tensors

if TYPE_CHECKING:
    from kubetune.data.prepared.rows import TrainedIds


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


def answer_sequence(prompt: Sequence[int], answer: Sequence[int]) -> TrainedIds:
    """Return the ids of a prompt with its answer, and which of them are trained: the answer's.

    prompt 7 8, answer 5 6 9    [7, 8, 5, 6, 9]    [False, False, True, True, True]
    """
    ids = np.array([*prompt, *answer], np.uint32)
    is_trained = np.arange(len(ids)) >= len(prompt)
    return ids, is_trained
