"""Copies of a checkpoint's tensors in memory of the host, written while the loop goes on."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kubetune.training.optimizer.adamw import FlatAdamW

WORTH_BACKGROUND_BYTES = 64 * 2**20
"""A smaller checkpoint is written sooner than its copy pays."""


def writes_in_background(setting: bool | str, optimizer: FlatAdamW) -> bool:
    """`training.async_save`, decided: `auto` where memory of the host holds the copy and the checkpoint is large."""
    if setting != "auto":
        return bool(setting)
    size = sum(t.numel() * t.element_size() for t in optimizer.state().values())
    return optimizer.master.is_cuda and size >= WORTH_BACKGROUND_BYTES


class Held(NamedTuple):
    """One rank's part of a checkpoint: copies, or the tensors themselves. No `weights`: as the model has them."""

    optimizer: dict[str, Tensor]
    weights: dict[str, Tensor] | None = None


class HostCopies:
    """Memory of the host that is kept from one checkpoint to the next."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, model: Any, optimizer: FlatAdamW, *, is_whole: bool) -> Held:
        """The tensors of this moment; the weights too where this rank has them whole."""
        state = {
            name: self._copy(f"optimizer.{name}", tensor)
            for name, tensor in optimizer.state().items()
        }
        if not is_whole:
            return Held(state)
        entries = model.state_dict(keep_vars=True)
        first_names = {
            id(value): name for name, value in reversed(entries.items())
        }  # a tied one is copied once
        weights = {
            name: self._copy(first_names[id(value)], value)
            if value.requires_grad
            else value.detach()
            for name, value in entries.items()
        }
        return Held(state, weights)

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._kept:
            self._kept[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return self._kept[name].copy_(tensor.detach())
