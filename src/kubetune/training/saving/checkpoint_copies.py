"""All that a checkpoint is written from, taken by the loop's thread between two steps.

A thread may write it while the loop goes on, so nothing in it is what the loop computes with: what a step changes is
copied to the memory of the host, and what no step changes (frozen weights) is only ever read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kubetune.base import logs
from kubetune.base.humanize import size
from kubetune.models import fsdp
from kubetune.models.padding_free import unwrap
from kubetune.training.optimizer.adamw import FlatAdamW
from kubetune.training.optimizer.shards import OptimizerShard
from kubetune.training.saving import saved_model
from kubetune.training.saving.saved_model import SavedModel

# Writing a smaller checkpoint takes so little time that a copy does not pay.
WORTH_BACKGROUND_BYTES = 64 * 2**20


def writes_in_background(setting: bool | str, optimizer: FlatAdamW, device_type: str) -> bool:
    """Return `training.async_save`. `auto` means large checkpoints on a GPU, whose copies are in other memory."""
    num_bytes = sum(tensor.nbytes for tensor in optimizer.state().values())
    # On a CPU the copies lie in the memory that the training needs.
    has_room = device_type == "cuda"
    if setting == "auto":
        return has_room and num_bytes >= WORTH_BACKGROUND_BYTES
    if setting and not has_room:
        logs.MODEL.info(
            "training.async_save: true keeps copies of more than %s in the memory that training needs; auto does so only "
            "on a GPU",
            size(num_bytes),
        )
    return bool(setting)


@dataclass(frozen=True)
class Snapshot:
    """What one rank writes of a checkpoint."""

    # Buffers by name, and where they are in those of the whole model.
    optimizer: dict[str, Tensor]
    shards: list[OptimizerShard]
    # None on ranks that write no model.
    model: SavedModel | None


class CheckpointCopies:
    """Makes snapshots of a run. With `background` they hold copies, in buffers that all checkpoints reuse."""

    def __init__(self, *, background: bool) -> None:
        self._background = background
        self._buffers: dict[str, Tensor] = {}

    def take(
        self,
        model: Any,
        optimizer: FlatAdamW,
        *,
        is_whole: bool,
        labelled: bool,
        is_main: bool,
    ) -> Snapshot:
        """Return the model and the optimizer as they are now.

        `is_whole`: this rank has all of the model, so that rank 0 (`is_main`) writes all of the checkpoint. `labelled`:
        the model is a classifier.
        """
        if is_whole and not is_main:
            return Snapshot({}, [], None)

        state = {}
        for name, tensor in optimizer.state().items():
            state[name] = self._kept(f"optimizer.{name}", tensor)
        shards = optimizer.shards
        if not is_main:
            return Snapshot(state, shards, None)

        saved: SavedModel
        if not is_whole:
            others = self._changing(fsdp.saved_beside(model))
            saved = saved_model.parts_with(model, optimizer.layout, others)
        elif unwrap(model) is not model:
            tensors = self._changing(saved_model.adapter_tensors(model))
            saved = saved_model.adapter_with(model, tensors, labelled=labelled)
        else:
            # `keep_vars`, so that trained parameters can be distinguished from frozen ones.
            weights = self._changing(model.state_dict(keep_vars=True))
            saved = saved_model.whole_with(model, weights)
        return Snapshot(state, shards, saved)

    def _changing(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors: of those that a step may change, copies."""
        # A tied weight has several names. It has one buffer, under its first name.
        first_names: dict[int, str] = {}
        for name, tensor in tensors.items():
            first_names.setdefault(id(tensor), name)
        kept = {}
        for name, tensor in tensors.items():
            is_frozen = isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
            if is_frozen:
                kept[name] = tensor.detach()
            else:
                kept[name] = self._kept(first_names[id(tensor)], tensor)
        return kept

    def _kept(self, name: str, tensor: Tensor) -> Tensor:
        if not self._background:
            return tensor.detach()
        # Made at the first checkpoint, and then reused.
        if name not in self._buffers:
            self._buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return self._buffers[name].copy_(tensor.detach())
