"""Rows of drawn answers: a prompt with one answer to it, and batches of such rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from kubetune.batching.batch import Batch, collate
from kubetune.batching.drawn_answers import DrawnAnswers, answer_sequence
from kubetune.batching.feed import empty_batch
from kubetune.batching.shared_beginnings import collate_shared

if TYPE_CHECKING:
    from kubetune.data.prepared.rows import TrainedIds
    from kubetune.training.rollouts.rollout_records import RewardedAnswer


@dataclass(frozen=True)
class AnswerRow:
    """An answer that a step learns from, with its prompt."""

    sample: int  # row of the training data
    prompt: list[int]
    answer: RewardedAnswer
    advantage: float
    shown: list[int] | None = None  # what a teacher reads in place of the prompt

    def __len__(self) -> int:
        """Return the number of tokens of prompt and answer."""
        return len(self.prompt) + len(self.answer.ids)

    @property
    def sequence(self) -> TrainedIds:
        """Return the ids of prompt and answer, and which of them are trained."""
        return answer_sequence(self.prompt, self.answer.ids)


def batch_of(
    rows: Sequence[AnswerRow],
    computed_labels: int,
    divisor: int,
    *,
    share_prefixes: bool,
) -> Batch:
    """Return rows as one batch; without any, one that goes through the whole model and adds nothing.

    `computed_labels`: tokens of all computed answers of the step. `divisor`: what the step's loss is divided by.
    """
    sequences = [row.sequence for row in rows]
    samples = [row.sample for row in rows]
    if not rows:
        batch = empty_batch(1, None)
    elif share_prefixes:
        batch = collate_shared(sequences, samples)
    else:
        batch = collate(sequences, samples)

    # Numbers of tokens lie end to end, row after row, also where rows share the tokens of a prefix.
    advantages = []
    counts = []
    sampled: list[float] = []
    for row in rows:
        advantages.append(row.advantage)
        counts.append(len(row.answer.ids))
        sampled += row.answer.sampled
    drawn = DrawnAnswers(
        advantages=torch.tensor(advantages),
        counts=torch.tensor(counts, dtype=torch.int64),
        sampled=torch.tensor(sampled),
        old=_end_to_end([row.answer.old for row in rows]),
        reference=_end_to_end([row.answer.reference for row in rows]),
        computed_labels=computed_labels,
        divisor=divisor,
    )
    read = None
    if any(row.shown is not None for row in rows):
        # The same answers, so that the labels are the same ones in the same order.
        read = collate(
            [answer_sequence(row.shown or row.prompt, row.answer.ids) for row in rows], samples
        )
    return replace(batch, drawn=drawn, read_by_teacher=read)


def _end_to_end(numbers_of_rows: Sequence[list[float] | None]) -> torch.Tensor | None:
    """Return the numbers of all rows' tokens as one tensor, `[labels]`; None if rows have none."""
    joined: list[float] = []
    for numbers in numbers_of_rows:
        if numbers is None:
            return None
        joined += numbers
    return torch.tensor(joined)
