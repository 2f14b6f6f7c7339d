"""A micro-batch as tensors: whole sequences end to end in one packed batch, never padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kubetune.batching.drawn_answers import DrawnAnswers
from kubetune.batching.extra_inputs import Pictures, PrefixTree, moved_tensors

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kubetune.data.prepared.rows import TrainedIds


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
    position_ids: Tensor  # int64 [tokens] they begin at 0 in each sequence
    cu_seqlens: tuple[int, ...]  # [sequences + 1] where sequences begin, and the end
    rows: Tensor  # int64 [labels] index of the token that predicts each label; empty for labelled texts
    # int64 [labels] ids to predict; of labelled texts fp32 [sequences, width].
    labels: Tensor
    samples: tuple[int, ...]  # ids of the rows of data that it was made from
    label_counts: tuple[int, ...] = ()  # [sequences] labels of each sequence

    # What only some kinds of records have.
    segments: Tensor | None = None  # int64 [tokens] token types of labelled texts
    pictures: Pictures | None = None  # of a vision-language model
    targets: Tensor | None = None  # fp32 [samples, 1] of answers
    # fp64 [samples, 2] log-probabilities of a pair's answers before training. A pair is two sequences, the chosen first.
    reference: Tensor | None = None

    teacher: Tensor | None = None  # fp32 [labels, numbers] what a teacher says of each

    # What a teacher reads in place of this batch, with the same labels; None: the same.
    read_by_teacher: Batch | None = None

    totals: object = None  # what a task needs to know about the whole global batch
    tree: PrefixTree | None = None  # set if rows share prefixes, which are sequences of their own
    drawn: DrawnAnswers | None = None  # of answers that the model drew itself

    @property
    def parents(self) -> tuple[int, ...]:
        """Of each sequence the one that it continues (PrefixTree); empty if rows share no prefixes."""
        if self.tree is None:
            return ()
        return self.tree.parents

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return self.cu_seqlens[-1]

    @property
    def num_labels(self) -> int:
        """Number of labels."""
        return len(self.labels)

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device. Pinned memory makes the copy to a GPU asynchronous."""
        if device.type == "cpu":
            return self
        # Fields that are no tensors stay: Python reads them without waiting for the GPU.
        moved: dict[str, Any] = moved_tensors(self, device)
        if self.pictures is not None:
            moved["pictures"] = self.pictures.to(device)
        if self.tree is not None:
            moved["tree"] = self.tree.to(device)
        if self.drawn is not None:
            moved["drawn"] = self.drawn.to(device)
        if self.read_by_teacher is not None:
            moved["read_by_teacher"] = self.read_by_teacher.to(device)
        return replace(self, **moved)


def collate(rows: Sequence[TrainedIds], samples: Sequence[int] = ()) -> Batch:
    """Lay sequences of (ids, trained) end to end. Token t predicts token t + 1 if that is trained."""
    # The names are those of the class's example.
    lengths = [len(ids) for ids, _ in rows]
    cu_seqlens = np.cumsum([0, *lengths])
    ids = np.concatenate([ids for ids, _ in rows]).astype(np.int64)
    positions = np.concatenate([np.arange(length) for length in lengths])

    trained = np.concatenate([trained for _, trained in rows]).astype(bool)
    # Nothing predicts the first token of a sequence: the token before it is another sequence's.
    trained[cu_seqlens[:-1]] = False
    targets = np.flatnonzero(trained)
    labels_before = np.searchsorted(targets, cu_seqlens)  # before each sequence, and of all
    return Batch(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(positions),
        cu_seqlens=tuple(cu_seqlens.tolist()),
        rows=torch.from_numpy(targets - 1),
        labels=torch.from_numpy(ids[targets]),
        samples=tuple(int(sample) for sample in samples),
        label_counts=tuple(np.diff(labels_before).tolist()),
    )


def collate_labelled(
    rows: Sequence[NDArray[np.uint32]],
    segments: Sequence[NDArray[np.uint8]],
    targets: NDArray[np.float32],
    samples: Sequence[int] = (),
) -> Batch:
    """Lay labelled sequences of ids end to end. `targets`: `[sequences, width]`."""
    # Without labels of tokens; then the labels of the sequences take their place.
    batch = collate([(ids, np.zeros(len(ids), bool)) for ids in rows], samples)

    token_types = torch.from_numpy(np.concatenate(segments).astype(np.int64))
    labels = torch.from_numpy(targets.astype(np.float32))
    return replace(batch, labels=labels, segments=token_types)
