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

    `input_ids`, `position_ids`: int64 `[tokens]`, positions restart in each sequence. `cu_seqlens`: where sequences
    begin and end, `[sequences + 1]`. `rows`: int64 `[labels]`, positions in the packed batch that predict; `labels`:
    int64 `[labels]`, what they should predict. `samples`: ids of the rows it was made from. Of labelled texts, `labels`
    is fp32 `[sequences, width]`, `rows` is empty, and `segments` holds the token types, int64 `[tokens]`. `pictures`
    are those of a vision-language model. A pair is two sequences, the chosen answer first; `targets`, of answers: fp32
    `[samples, 1]`; `reference`: fp64 `[samples, 2]`, log-probabilities of their labels before training. `label_counts`:
    labels of each sequence. `totals`: what a task needs to know of the whole global batch. With a `tree` rows share
    beginnings, which are sequences of their own.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: tuple[int, ...]
    rows: Tensor
    labels: Tensor
    samples: tuple[int, ...]
    segments: Tensor | None = None
    pictures: Pictures | None = None
    targets: Tensor | None = None
    reference: Tensor | None = None
    label_counts: tuple[int, ...] = ()
    totals: object = None
    tree: PrefixTree | None = None

    @property
    def parents(self) -> tuple[int, ...]:
        """Numbers of the sequences that others go on from (PrefixTree); empty where none does."""
        return () if self.tree is None else self.tree.parents

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return self.cu_seqlens[-1]

    @property
    def num_labels(self) -> int:
        """Tokens that are trained."""
        return len(self.labels)

    def to(self, device: torch.device) -> Batch:
        """The batch on a device; pinned memory makes the copy to a GPU asynchronous."""
        if device.type == "cpu":
            return self
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {
            n: moved_tensor(t, device) for n, t in tensors.items() if isinstance(t, Tensor)
        }
        pictures = self.pictures and self.pictures.to(device)
        return replace(self, pictures=pictures, tree=self.tree and self.tree.to(device), **moved)


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
