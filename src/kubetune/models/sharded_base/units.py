"""Bytes that are borrowed together: each rank holds a part of them, and all of them are here while they are used.

They are never seen as numbers: copies of floats may rewrite NaN patterns. The tensors of a unit are views of one storage.
It is emptied and filled again in place, so that what autograd has saved for the backward is filled again too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kubetune.base import fault_injection
from kubetune.distributed import process_group
from kubetune.distributed.process_group import Group, World

# Tensors begin at multiples of so many bytes, as kernels expect of memory that is allocated.
ALIGNMENT = 256
# torch 2.13 has renamed it, and warns of the old name.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Unit:
    """Tensors that are borrowed together: of a decoder layer, or a table of tokens."""

    def __init__(
        self, tensors: Sequence[Sequence[Tensor]], world: World, group: Group = None
    ) -> None:
        """Keep this rank's part of the bytes. `tensors`: those with the same memory together, which become views.

        `world`: the ranks that have the parts, which are a `group`.
        """
        self._group = group
        self._arrival: Any = None  # of bytes that are on the way
        self._is_whole = True

        # Alike on all ranks, and parts of equal size:
        #
        #     tensor a     tensor b             room
        #     aaaaaaaa.... bbbbbbbbbbbbbbbb.... ....
        #     part of rank 0        part of rank 1
        places = []
        end = 0
        for tensor, *_ in tensors:
            places.append(end)
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        share = -(-end // (world.size * ALIGNMENT)) * ALIGNMENT
        self._whole = torch.zeros(share * world.size, dtype=torch.uint8, device=world.device)
        for views, place in zip(tensors, places, strict=True):
            _move(views, self._whole, place)

        first = world.rank * share
        self.tensors = [tensor for views in tensors for tensor in views]
        self.part = self._whole[first : first + share].clone()
        self.nbytes = self._whole.nbytes

    @property
    def is_asked_for(self) -> bool:
        """True if the whole bytes are here or on the way."""
        return self._is_whole or self._arrival is not None

    def ask(self) -> None:
        """Begin to gather the bytes of all ranks, if they are neither here nor on the way."""
        if self.is_asked_for:
            return
        self._whole.untyped_storage().resize_(self.nbytes)
        with process_group.noticing_losses():
            self._arrival = _ALL_GATHER(self._whole, self.part, group=self._group, async_op=True)

    def borrow(self) -> None:
        """Have the whole bytes here."""
        if self._is_whole:
            return
        self.ask()
        with process_group.peers():
            fault_injection.reach("gather")
            self._arrival.wait()
        self._arrival = None
        self._is_whole = True

    def give_back(self) -> None:
        """Keep this rank's part alone."""
        if self._arrival is not None:
            self.borrow()
        if self._is_whole:
            self._whole.untyped_storage().resize_(0)
            self._is_whole = False


def _move(tensors: Sequence[Tensor], room: Tensor, place: int) -> None:
    """Move the bytes of a dense tensor into `room`. All `tensors`, which have this memory, become views of them."""
    data = tensors[0].data
    stretch = room[place : place + data.nbytes]
    # As they lie, whatever the order of the dimensions is.
    stretch.copy_(data.as_strided((data.numel(),), (1,)).view(torch.uint8))
    numbers = stretch.view(data.dtype)
    for tensor in tensors:
        # `.data` has a version of its own. Else each time that `room` is filled would count as a change of the weight.
        tensor.data = numbers.as_strided(
            tensor.shape, tensor.stride(), numbers.storage_offset()
        ).data
