"""Update only the rows of an embedding table that occur in the data.

AdamW without weight decay adds zero to a number that never had a gradient, so the other rows keep every bit. Of a small
model's parameters the table is the largest part, and an epoch uses few of its rows. Rows that occur lie together in
buffers of their own, since scattered rows take longer to reach than a whole table in order. A table of 6 rows, of which
row 4 occurred first and then row 1:

    _slots       -1  1 -1 -1  0 -1      by row of the table: its row in the buffers, -1 for none
    _ids          4  1                  by row of the buffers: its row in the table
    _buffers     [4] [1]                these rows of master, gradient, exp_avg, exp_avg_sq
    touched       1  4                  rows with a gradient in this step, sorted
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Numbers of a table. For a smaller one it does not pay; for a larger one the memory forecast would have to count the
# buffers.
LEAST = 2**18
MOST = 2**23
# At most one of so many rows may occur. With more, the whole table is updated.
SHARE = 2
# Numbers that vector units take at once. Rows that are a multiple of it give the same bits wherever they lie.
ALIGNED = 16


class OccurringRows:
    """Rows of a table `[rows, width]` that have occurred, copied out of the optimizer's buffers.

    The optimizer's buffers keep the old values until `write_back`.
    """

    def __init__(
        self,
        weight: Tensor,
        span: slice,
        parts: tuple[Tensor, ...],
    ) -> None:
        self.weight = weight
        self.span = span  # of the table in the optimizer's buffers
        self._parts = parts  # the table's parts of master, gradient, exp_avg and exp_avg_sq
        self.touched = torch.empty(0, dtype=torch.long)
        self._slots = torch.empty(0, dtype=torch.long)
        self._ids = torch.empty(0, dtype=torch.long)
        self._buffers: tuple[Tensor, ...] = ()  # made when the first row occurs

    @staticmethod
    def fit(weight: Tensor, span: slice) -> bool:
        """True if a parameter may be a table whose rows can be updated alone."""
        if weight.dim() != 2 or weight.device.type != "cpu":
            return False
        is_aligned = weight.shape[1] % ALIGNED == 0 and span.start % ALIGNED == 0
        return is_aligned and LEAST <= weight.numel() <= MOST

    @property
    def is_empty(self) -> bool:
        """True while no row has occurred."""
        return not len(self._ids)

    def admit(self, rows: Tensor) -> bool:
        """Give buffers to rows, sorted and each once, that have none. Return False if too many rows have occurred."""
        # Made when the first row occurs.
        if not self._buffers:
            count, width = self.weight.shape
            self._slots = torch.full((count,), -1)
            self._buffers = tuple(torch.empty(count // SHARE, width) for _ in self._parts)

        new = rows[self._slots.index_select(0, rows) < 0]
        first = len(self._ids)
        stop = first + len(new)
        if stop > len(self._buffers[0]):
            return False

        self._slots[new] = torch.arange(first, stop)
        self._ids = torch.cat([self._ids, new])
        for buffer, part in zip(self._buffers, self._parts, strict=True):
            torch.index_select(part, 0, new, out=buffer[first:stop])
        return True

    def add(self, rows: Tensor, values: Tensor) -> bool:
        """Add to the gradient of rows. Return False, and add nothing, if too many rows have occurred."""
        # A gradient of only zeros, as of the last word of a sequence, leaves no moments by which a resumed run would know
        # that the row has occurred.
        is_moved = values.any(1)
        # A word that occurs twice has two gradients, which are added up.
        rows = rows[is_moved]
        distinct = rows.unique()
        if not self.admit(distinct):
            return False
        slots = self._slots.index_select(0, rows)
        self._buffers[1].index_add_(0, slots, values[is_moved])
        if len(self.touched):
            distinct = torch.cat([self.touched, distinct]).unique()
        self.touched = distinct
        return True

    def buffers(self) -> list[Tensor]:
        """Return the four buffers of the rows that have occurred, `[numbers]`."""
        return [buffer[: len(self._ids)].view(-1) for buffer in self._buffers]

    def gradient(self) -> Tensor:
        """Return the gradient of the rows that have one, in the order of the table.

        So its norm does not depend on when the rows first occurred, which a resumed run does not know.
        """
        if not self._buffers:
            return torch.empty(0)
        slots = self._slots[self.touched]
        return self._buffers[1].index_select(0, slots).view(-1)

    def clear_gradient(self) -> None:
        """Set the gradient to zero."""
        if len(self.touched):
            self._buffers[1].index_fill_(0, self._slots[self.touched], 0.0)
            self.touched = self.touched[:0]

    def refresh(self) -> None:
        """Copy the updated rows to the weights."""
        if len(self._ids):
            values = self._buffers[0][: len(self._ids)].to(self.weight.dtype)
            _put(self.weight.data, self._ids, values)

    def write_back(self) -> None:
        """Copy the rows back to the optimizer's buffers."""
        for buffer, part in zip(self._buffers, self._parts, strict=False):
            _put(part, self._ids, buffer[: len(self._ids)])

    def read_again(self) -> OccurringRows | None:
        """Return the same table after a checkpoint was loaded: a row has occurred if it has moments. None if too many."""
        _, _, exp_avg, exp_avg_sq = self._parts
        rows = (exp_avg.any(1) | exp_avg_sq.any(1)).nonzero()[:, 0]
        table = OccurringRows(self.weight, self.span, self._parts)
        if len(rows) and not table.admit(rows):
            return None
        return table


def _put(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """Copy values to rows of a table."""
    # torch copies number by number, so the numbers are read as the widest kind that there is.
    table.view(torch.complex128).index_copy_(0, rows, values.view(torch.complex128))


def _rows_of(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of a sparse gradient, with repeats, and their values in fp32."""
    if hasattr(gradient, "_indices"):
        return gradient._indices()[0], gradient._values().float()
    # Without torch's names for the parts that are not summed yet, repeats are summed in the dtype of the gradient.
    summed = gradient.coalesce()
    return summed.indices()[0], summed.values().float()


@dataclass
class Collected:
    """The sum of one parameter's gradient in fp32."""

    gradient: Tensor  # the parameter's part of the optimizer's `gradient`
    is_zero: bool = True  # nothing was added yet in this step
    # If the parameter is a table whose rows are updated alone, the sum is there instead.
    occurring: OccurringRows | None = None

    def add(self, gradient: Tensor) -> None:
        """Add a gradient that autograd made, of any dtype, dense or of some rows."""
        if gradient.is_sparse:
            rows, values = _rows_of(gradient)
            if self.occurring is None or not self.occurring.add(rows, values):
                self.opened().index_add_(0, rows, values)
        elif self.is_zero:
            # Adding bf16 to fp32 makes an fp32 copy first, four times the work of writing it where nothing is yet.
            self.opened().copy_(gradient)
        else:
            self.opened().add_(gradient)

    def opened(self) -> Tensor:
        """Return the sum in the optimizer's buffer, to add to it directly, as kernels/cross_entropy.py does."""
        self.is_zero = False
        if self.occurring is not None:
            self.occurring.write_back()
            self.occurring = None
        return self.gradient


def occurring(sums: Iterable[Collected]) -> list[OccurringRows]:
    """Return the tables that are updated row by row, of which a row has occurred."""
    tables = []
    for collected in sums:
        rows = collected.occurring
        if rows is not None and not rows.is_empty:
            tables.append(rows)
    return tables


def around(tables: Iterable[OccurringRows], size: int) -> Iterator[slice]:
    """Yield the stretches of the optimizer's buffers, `size` numbers, before, between and after tables."""
    start = 0
    for rows in tables:
        yield slice(start, rows.span.start)
        start = rows.span.stop
    yield slice(start, size)
