"""Parts of a batch beside its tokens: the images in it, and the beginnings that its rows share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
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
    Both are None where no sequence has an image. `counts`: images of each sequence; `inputs`, of a model whose images
    are no grids: what its own processor made of those of each.
    """

    positions: Tensor
    is_image: Tensor
    pixel_values: Tensor | None = None
    grids: Tensor | None = None
    counts: tuple[int, ...] = ()
    inputs: tuple[dict[str, Tensor], ...] = ()

    def of(self, sequences: Sequence[int], cu_seqlens: Sequence[int]) -> Pictures:
        """Those of some sequences of a batch alone, which begin and end at `cu_seqlens`."""
        spans = [slice(cu_seqlens[number], cu_seqlens[number + 1]) for number in sequences]
        kept = replace(
            self,
            positions=torch.cat([self.positions[:, span] for span in spans], 1),
            is_image=torch.cat([self.is_image[span] for span in spans]),
            counts=tuple(self.counts[number] for number in sequences),
            inputs=tuple(self.inputs[number] for number in sequences) if self.inputs else (),
        )
        if self.grids is None or self.pixel_values is None:
            return kept
        ends = list(accumulate(self.counts, initial=0))
        images = [image for number in sequences for image in range(ends[number], ends[number + 1])]
        if not images:
            return replace(kept, pixel_values=None, grids=None)
        patches = self.pixel_values.split(self.grids.prod(1).tolist())
        return replace(kept, pixel_values=torch.cat([patches[image] for image in images]), grids=self.grids[images])

    def to(self, device: torch.device) -> Pictures:
        """The same on a device."""
        names = ("positions", "is_image", "pixel_values", "grids")
        moved: dict[str, Any] = {name: moved_tensor(getattr(self, name), device) for name in names}
        inputs = tuple({name: tensor.to(device) for name, tensor in own.items()} for own in self.inputs)
        return replace(self, **moved, inputs=inputs)


@dataclass(frozen=True)
class PrefixTree:
    """Beginnings that rows share, of which each is a sequence of a packed batch, as is what each row has of its own.

    `parents` `[sequences]`: the sequence that each goes on from, with positions that go on too, -1 where it begins a
    row; a parent comes before its children, and the longest row is not interrupted by others. `places`: int64
    `[labels]`, which of the batch's `rows` predicts each label: the last token of a beginning predicts many. `counts`:
    labels come in runs of those that equally many rows have: how many labels, and how many rows. `entries`,
    int64: for every label of every row, one row after the other, which of the batch's labels it is. `ends`: int64
    `[rows]`, where the last token of each row stands.
    """

    parents: tuple[int, ...]
    places: Tensor
    counts: tuple[tuple[int, int], ...]
    entries: Tensor
    ends: Tensor

    def to(self, device: torch.device) -> PrefixTree:
        """The same on a device."""
        names = ("places", "entries", "ends")
        moved: dict[str, Any] = {name: moved_tensor(getattr(self, name), device) for name in names}
        return replace(self, **moved)
