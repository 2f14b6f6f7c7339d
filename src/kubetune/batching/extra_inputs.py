"""Parts of a batch besides its tokens: its images, and the prefixes that its rows share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor


def moved_tensors(part: Any, device: torch.device) -> dict[str, Tensor]:
    """Return copies on a device of the tensors in a dataclass's fields, without waiting for them: name -> copy."""
    moved = {}
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, Tensor):
            # From pageable memory the copy would wait, and with it the loop.
            moved[field.name] = value.pin_memory().to(device, non_blocking=True)
    return moved


@dataclass(frozen=True)
class Pictures:
    """The images of a micro-batch, and where they are in it."""

    positions: Tensor  # int64 [3, tokens] in time, down and across
    is_image: Tensor  # bool [tokens]
    pixel_values: Tensor | None = None  # fp32 [patches, values] of all images; None without images
    # int64 [images, 3]: patches in time, down, across. None without images.
    grids: Tensor | None = None
    counts: tuple[int, ...] = ()  # [sequences] images of each
    # [sequences] what a model's own processor made of the images of each, if its images are no grids of patches.
    inputs: tuple[dict[str, Tensor], ...] = ()

    def of(self, sequences: Sequence[int], cu_seqlens: Sequence[int]) -> Pictures:
        """Return only the images of some sequences. `cu_seqlens`: where the batch's sequences begin, and the end."""
        # Everything by token or by sequence is cut out of the whole batch.
        spans = [slice(cu_seqlens[number], cu_seqlens[number + 1]) for number in sequences]
        inputs: tuple[dict[str, Tensor], ...] = ()
        if self.inputs:
            inputs = tuple(self.inputs[number] for number in sequences)
        kept = replace(
            self,
            positions=torch.cat([self.positions[:, span] for span in spans], 1),
            is_image=torch.cat([self.is_image[span] for span in spans]),
            counts=tuple(self.counts[number] for number in sequences),
            inputs=inputs,
        )
        if self.grids is None or self.pixel_values is None:
            return kept

        # Images lie end to end, and so do the patches of all images: first which images, then their patches.
        ends = list(accumulate(self.counts, initial=0))
        images: list[int] = []
        for number in sequences:
            images.extend(range(ends[number], ends[number + 1]))
        if not images:
            return replace(kept, pixel_values=None, grids=None)
        patches_of_image = self.grids.prod(1).tolist()
        patches = self.pixel_values.split(patches_of_image)
        return replace(
            kept,
            pixel_values=torch.cat([patches[image] for image in images]),
            grids=self.grids[images],
        )

    def to(self, device: torch.device) -> Pictures:
        """Return a copy on a device."""
        inputs = []
        for of_sequence in self.inputs:
            inputs.append({name: tensor.to(device) for name, tensor in of_sequence.items()})
        moved: dict[str, Any] = moved_tensors(self, device)
        return replace(self, **moved, inputs=tuple(inputs))


@dataclass(frozen=True)
class PrefixTree:
    """How the rows of a packed batch share sequences: rows with the same prefix have one sequence for it.

    Example: row 0 is "S S S a" and row 1 is "S S S b c". Row 0 trains the second S and a, row 1 the second S, b and c.
    The prefix S S S occurs once; the longest row continues right after it:

        token        0 1 2 | 3 4 | 5        sequence 0: S S S     1: b c     2: a
                     S S S | b c | a        parents     -1        0          0

        The batch's labels, those of one row first:    b   c   a   S
        predicted by token                             2   3   2   0      Batch.rows are the tokens 0 2 3
        places (index into Batch.rows)                 1   2   1   0
        counts                                         (3, 1): three labels of one row each; (1, 2): one of two rows
        entries (index of each row's labels)           row 0: 3 2 (S, a)   row 1: 3 0 1 (S, b, c)
        ends                                           row 0: token 5      row 1: token 4
    """

    parents: tuple[int, ...]  # [sequences] the sequence that each one continues, -1 for none
    places: Tensor  # int64 [labels] which of the batch's `rows` predicts each label
    # Runs of labels: (number of labels, number of rows that have them).
    counts: tuple[tuple[int, int], ...]
    entries: Tensor  # int64 [labels of all rows] index into the batch's labels, row after row
    ends: Tensor  # int64 [rows] the last token of each row

    def to(self, device: torch.device) -> PrefixTree:
        """Return a copy on a device."""
        moved: dict[str, Any] = moved_tensors(self, device)
        return replace(self, **moved)
