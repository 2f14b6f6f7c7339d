"""From prepared rows to tensors: a micro-batch is one packed batch of whole sequences, never padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kubetune.batching.extra_inputs import Pictures, PrefixTree, moved_tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Batch:
    """One micro-batch: sequences laid end to end, with the places where the next token is a label.

    Example: "A B c d" and "E f", of which c, d and f are trained:

        token          0 1 2 3 | 4 5      cu_seqlens     0 4 6
        input_ids      A B c d | E f      rows           1 2 4   (B predicts c, c predicts d, E predicts f)
        position_ids   0 1 2 3 | 0 1      labels         c d f
                                          label_counts   2 1
    """

    input_ids: Tensor  # int64 [tokens]
    position_ids: Tensor  # int64 [tokens] they begin anew in each sequence
    cu_seqlens: tuple[int, ...]  # [sequences + 1] where sequences begin and end
    rows: Tensor  # int64 [labels] index of the token that predicts each label; empty for labelled texts
    # int64 [labels] what is to be predicted; of labelled texts fp32 [sequences, width].
    labels: Tensor
    samples: tuple[int, ...]  # ids of the rows of data that it was made from
    segments: Tensor | None = None  # int64 [tokens] token types of labelled texts
    pictures: Pictures | None = None  # of a vision-language model
    targets: Tensor | None = None  # fp32 [samples, 1] of answers
    # fp64 [samples, 2] log-probabilities of a pair's labels before training. A pair is two sequences, the chosen first.
    reference: Tensor | None = None
    label_counts: tuple[int, ...] = ()  # [sequences] labels of each sequence
    totals: object = None  # what a task needs to know of the whole global batch
    tree: PrefixTree | None = None  # set where rows share beginnings, each a sequence by itself

    @property
    def parents(self) -> tuple[int, ...]:
        """Return the numbers of the sequences that others go on from (PrefixTree); empty where none does."""
        return () if self.tree is None else self.tree.parents

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all sequences."""
        return self.cu_seqlens[-1]

    @property
    def num_labels(self) -> int:
        """Return the number of tokens that are trained."""
        return len(self.labels)

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device. Pinned memory makes the copy to a GPU asynchronous."""
        if device.type == "cpu":
            return self
        moved: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                moved[field.name] = moved_tensor(value, device)
            elif isinstance(value, (Pictures, PrefixTree)):
                moved[field.name] = value.to(device)
        return replace(self, **moved)


def collate(
    rows: Sequence[tuple[NDArray[np.uint32], NDArray[np.bool_]]], samples: Sequence[int] = ()
) -> Batch:
    """Lay sequences of (ids, trained) end to end. Position t predicts token t + 1 where that one is trained."""
    cu_seqlens = np.cumsum([0, *(len(ids) for ids, _ in rows)])
    ids = np.concatenate([ids for ids, _ in rows]).astype(np.int64)
    trained = np.concatenate([trained for _, trained in rows]).astype(bool)
    trained[cu_seqlens[:-1]] = False
    positions = np.concatenate([np.arange(len(ids)) for ids, _ in rows])
    targets = np.flatnonzero(trained)
    return Batch(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(positions),
        cu_seqlens=tuple(cu_seqlens.tolist()),
        rows=torch.from_numpy(targets - 1),
        labels=torch.from_numpy(ids[targets]),
        samples=tuple(int(s) for s in samples),
        label_counts=tuple(np.diff(np.searchsorted(targets, cu_seqlens)).tolist()),
    )


def collate_labelled(
    rows: Sequence[NDArray[np.uint32]],
    segments: Sequence[NDArray[np.uint8]],
    targets: NDArray[np.float32],
    samples: Sequence[int] = (),
) -> Batch:
    """Lay labelled sequences of ids end to end. `targets`: `[sequences, width]`."""
    batch = collate([(ids, np.zeros(len(ids), bool)) for ids in rows], samples)
    types = torch.from_numpy(np.concatenate(segments).astype(np.int64))
    return replace(batch, labels=torch.from_numpy(targets.astype(np.float32)), segments=types)
