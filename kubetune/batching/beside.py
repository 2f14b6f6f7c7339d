"""Parts of a batch beside its tokens: the images in it, and the beginnings that its rows share."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


def moved_tensor(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    """A copy on a device, made by way of pinned memory and not waited for; None of None."""
    return None if tensor is None else tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class Pictures:
    """The images of a micro-batch, and where they stand in it.

    `positions`: int64 `[3, tokens]`, in time, down and across; `is_image`: bool `[tokens]`. `pixel_values`: fp32
    `[patches, values]`, of all images end to end; `grids`: int64 `[images, 3]`, patches in time, down and across.
    Both are None where no sequence has an image. `inputs`, of a model whose images are no grids: what its own processor
    made of those of a lone sequence.
    """

    positions: Tensor
    is_image: Tensor
    pixel_values: Tensor | None = None
    grids: Tensor | None = None
    inputs: dict[str, Tensor] | None = None

    def to(self, device: torch.device) -> Pictures:
        """The same on a device."""
        names = [field.name for field in fields(self) if field.name != "inputs"]
        moved: dict[str, Any] = {name: moved_tensor(getattr(self, name), device) for name in names}
        inputs = self.inputs and {name: tensor.to(device) for name, tensor in self.inputs.items()}
        return Pictures(**moved, inputs=inputs)


@dataclass(frozen=True)
class PrefixTree:
    """Beginnings that rows share, of which each is a sequence of a packed batch, as is what each row has of its own.

    `parents` `[sequences]`: the sequence that each goes on from, with positions that go on too, -1 where it begins a
    row; a parent comes before its children, and the longest row is not interrupted by others. `places`: int64
    `[labels]`, which of the batch's `rows` predicts each label: the last token of a beginning predicts many. `counts`:
    labels come in runs of those that equally many rows have: how many labels, and how many rows. `entries`,
    int64: for every label of every row, one row after the other, which of the batch's labels it is.
    """

    parents: tuple[int, ...]
    places: Tensor
    counts: tuple[tuple[int, int], ...]
    entries: Tensor

    def to(self, device: torch.device) -> PrefixTree:
        """The same on a device."""
        moved: dict[str, Any] = {name: moved_tensor(getattr(self, name), device) for name in ("places", "entries")}
        return replace(self, **moved)
