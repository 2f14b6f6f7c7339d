"""Copies of a checkpoint's tensors in the memory of the host; a thread writes them while the loop goes on."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kubetune.training.optimizer.adamw import FlatAdamW

# Writing a smaller checkpoint takes so little time that a copy does not pay.
WORTH_BACKGROUND_BYTES = 64 * 2**20


def writes_in_background(setting: bool | str, optimizer: FlatAdamW) -> bool:
    """Return `training.async_save`. `auto` means large checkpoints on a GPU, whose copies are in other memory."""
    if setting != "auto":
        return bool(setting)
    # On a CPU the copies would lie in the memory that the training needs.
    size = sum(tensor.nbytes for tensor in optimizer.state().values())
    return optimizer.master.is_cuda and size >= WORTH_BACKGROUND_BYTES


class Tensors(NamedTuple):
    """What one rank writes of a checkpoint: copies, or the tensors themselves."""

    optimizer: dict[str, Tensor]
    # None: take them from the model while they are written.
    weights: dict[str, Tensor] | None = None


class CheckpointCopies:
    """Buffers in the host's memory, which all checkpoints reuse."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(
        self,
        model: Any,
        optimizer: FlatAdamW,
        *,
        is_whole: bool,
    ) -> Tensors:
        """Copy the tensors as they are now, and the weights too if this rank has all of them (`is_whole`)."""
        state = {}
        for name, tensor in optimizer.state().items():
            state[name] = self._copy(f"optimizer.{name}", tensor)
        if not is_whole:
            return Tensors(state)

        # `keep_vars`, so that trained parameters can be distinguished from frozen ones.
        entries = model.state_dict(keep_vars=True)
        # A tied weight has several names. It has one buffer, under its first name.
        first_names: dict[int, str] = {}
        for name, value in entries.items():
            first_names.setdefault(id(value), name)
        weights = {}
        for name, value in entries.items():
            if value.requires_grad:
                weights[name] = self._copy(first_names[id(value)], value)
            else:
                weights[name] = value.detach()  # frozen, so no step changes it

        return Tensors(state, weights)

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        # Made at the first checkpoint, and then reused.
        if name not in self._buffers:
            self._buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return self._buffers[name].copy_(tensor.detach())
