"""Gradients as they are collected, and tables of words of which few rows occur: those alone are moved, which changes no
bit of the others.

AdamW without weight decay moves by zero what never had a gradient. Of a small model's parameters the table is most, and
of its words an epoch holds a part. Rows that occur lie together in buffers of their own, since rows that are apart
take longer to reach than all take in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LEAST, MOST = 2**18, 2**23
"""Numbers of a table that pays, and of one whose rows the forecast of memory may overlook."""
SHARE = 2
"""One of so many rows may occur: with more, all are moved."""
ALIGNED = 16
"""Numbers that vector units take at once: rows of whole ones are moved alike wherever they lie."""


class OccurringRows:
    """Rows of a table `[rows, width]` that have occurred, out of the optimizer's buffers.

    `parts`: the table's parts of `master`, `gradient`, `exp_avg` and `exp_avg_sq`, which know nothing of what happens
    here until `write_back`. `touched`: sorted rows of the gradient, while there is one.
    """

    def __init__(self, weight: Tensor, span: slice, parts: tuple[Tensor, ...]) -> None:
        self.weight, self.span, self._parts = weight, span, parts
        self.touched = torch.empty(0, dtype=torch.long)
        self._slots = torch.empty(0, dtype=torch.long)
        self._ids = torch.empty(0, dtype=torch.long)
        self._buffers: tuple[Tensor, ...] = ()

    @staticmethod
    def fit(weight: Tensor, span: slice) -> bool:
        """Test for what may be a table whose rows can be moved by themselves."""
        is_aligned = weight.dim() == 2 and weight.shape[1] % ALIGNED == span.start % ALIGNED == 0
        return is_aligned and weight.device.type == "cpu" and LEAST <= weight.numel() <= MOST

    @property
    def is_empty(self) -> bool:
        """True while none has occurred."""
        return not len(self._ids)

    def admit(self, rows: Tensor) -> bool:
        """Let sorted rows, each once, be among those that have occurred; False where they are too many."""
        if not self._buffers:
            count, width = self.weight.shape
            self._slots = torch.full((count,), -1)
            self._buffers = tuple(torch.empty(count // SHARE, width) for _ in self._parts)
        new = rows[self._slots.index_select(0, rows) < 0]
        first, stop = len(self._ids), len(self._ids) + len(new)
        if stop > len(self._buffers[0]):
            return False
        self._slots[new] = torch.arange(first, stop)
        self._ids = torch.cat([self._ids, new])
        for buffer, part in zip(self._buffers, self._parts, strict=True):
            torch.index_select(part, 0, new, out=buffer[first:stop])
        return True

    def add(self, rows: Tensor, values: Tensor) -> bool:
        """Add to the gradient of rows; False, and nothing, where too many have occurred."""
        # Zeros alone, as of a word that stands last in its sequence, leave no moments by which a resume knows the row.
        is_moved = values.any(1)
        rows, values = rows[is_moved], values[is_moved]
        found = rows.unique()
        if not self.admit(found):
            return False
        self._buffers[1].index_add_(0, self._slots.index_select(0, rows), values)
        self.touched = found if not len(self.touched) else torch.cat([self.touched, found]).unique()
        return True

    def buffers(self) -> list[Tensor]:
        """The four buffers of the rows that have occurred, `[numbers]`."""
        return [buffer[: len(self._ids)].view(-1) for buffer in self._buffers]

    def gradient(self) -> Tensor:
        """The gradient of the rows that have one, in their order in the table: what is summed must not depend on when
        they occurred."""
        return (
            self._buffers[1].index_select(0, self._slots[self.touched]).view(-1)
            if self._buffers
            else torch.empty(0)
        )

    def clear_gradient(self) -> None:
        """Forget what was added up."""
        if len(self.touched):
            self._buffers[1].index_fill_(0, self._slots[self.touched], 0.0)
            self.touched = self.touched[:0]

    def refresh(self) -> None:
        """Let the weights follow what was moved."""
        if len(self._ids):
            _put(
                self.weight.data,
                self._ids,
                self._buffers[0][: len(self._ids)].to(self.weight.dtype),
            )

    def write_back(self) -> None:
        """Let the optimizer's buffers hold what is here."""
        for buffer, part in zip(self._buffers, self._parts, strict=False):
            _put(part, self._ids, buffer[: len(self._ids)])

    def read_again(self) -> OccurringRows | None:
        """The same table anew, where what has moments has occurred; None where that is too much."""
        rows = torch.stack([part.any(1) for part in self._parts[2:]]).any(0).nonzero()[:, 0]
        found = OccurringRows(self.weight, self.span, self._parts)
        return found if not len(rows) or found.admit(rows) else None


def _put(table: Tensor, rows: Tensor, values: Tensor) -> None:
    # torch copies one number at a time: these are as wide as they can be.
    table.view(torch.complex128).index_copy_(0, rows, values.view(torch.complex128))


@dataclass
class Collected:
    """Sum of one parameter's gradient in fp32: a part of the optimizer's `gradient`, or in `occurring` rows."""

    gradient: Tensor
    is_zero: bool = True
    occurring: OccurringRows | None = None

    def add(self, gradient: Tensor) -> None:
        """Add what autograd made, of whatever dtype, dense or of some rows."""
        # Adding bf16 to fp32 first makes an fp32 copy: four times the work of writing it where nothing is yet.
        if gradient.is_sparse:
            rows, values = gradient._indices()[0], gradient._values().float()
            if self.occurring is None or not self.occurring.add(rows, values):
                self.opened().index_add_(0, rows, values)
        elif self.is_zero:
            self.opened().copy_(gradient)
        else:
            self.opened().add_(gradient)

    def opened(self) -> Tensor:
        """The sum, for those who add to it themselves (kernels/cross_entropy.py)."""
        self.is_zero = False
        if self.occurring is not None:
            self.occurring.write_back()
            self.occurring = None
        return self.gradient
