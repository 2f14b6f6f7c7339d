"""From prepared rows to tensors: one micro-batch is one flat stream of whole sequences, never padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Batch:
    """One micro-batch: sequences laid end to end, with the places where the next token is a label.

    `input_ids`, `position_ids`: int64 `[tokens]`, positions restart in each sequence. `borders`: where sequences
    begin and end, `[sequences + 1]`. `rows`: int64 `[labels]`, positions in the stream that predict; `labels`: int64
    `[labels]`, what they should predict. `samples`: ids of the rows it was made from.
    """

    input_ids: Tensor
    position_ids: Tensor
    borders: tuple[int, ...]
    rows: Tensor
    labels: Tensor
    samples: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.borders[-1]

    @property
    def num_labels(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> Batch:
        """The batch on a device; pinned memory makes the copy to a GPU asynchronous."""
        if device.type == "cpu":
            return self
        tensors = {name: getattr(self, name) for name in ("input_ids", "position_ids", "rows", "labels")}
        return replace(self, **{name: t.pin_memory().to(device, non_blocking=True) for name, t in tensors.items()})


def collate(rows: Sequence[tuple[NDArray[np.uint32], NDArray[np.bool_]]], samples: Sequence[int] = ()) -> Batch:
    """Lay sequences of (ids, trained) end to end. Position t predicts token t + 1 where that one is trained."""
    borders = np.cumsum([0, *(len(ids) for ids, _ in rows)])
    ids = np.concatenate([ids for ids, _ in rows]).astype(np.int64)
    trained = np.concatenate([trained for _, trained in rows]).astype(bool)
    trained[borders[:-1]] = False
    positions = np.concatenate([np.arange(len(ids)) for ids, _ in rows])
    targets = np.flatnonzero(trained)
    return Batch(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(positions),
        borders=tuple(borders.tolist()),
        rows=torch.from_numpy(targets - 1),
        labels=torch.from_numpy(ids[targets]),
        samples=tuple(int(s) for s in samples),
    )
