"""AdamW over the slices of a sharded model (FSDP2), and the choice of a run's optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from kubetune.base import logs
from kubetune.config.schema import TrainingConfig
from kubetune.distributed import process_group
from kubetune.distributed.process_group import World
from kubetune.training.optimizer.adam_step import AdamSettings
from kubetune.training.optimizer.adamw import FlatAdamW, sum_of_squares
from kubetune.training.optimizer.adamw_8bit import FlatAdamW8bit
from kubetune.training.optimizer.shards import OptimizerShard

# Private names of torch by which slices are moved into the buffers. Without them slices stay where they are, and get a
# copy of the new values after each step.
LOCAL = "_local_tensor"  # of a DTensor: this rank's slice
STATE = "_get_fsdp_state"  # of a sharded module: what FSDP keeps of it
GROUPS = "_fsdp_param_groups"  # of that state


def make_optimizer(model: nn.Module, training: TrainingConfig) -> FlatAdamW:
    """Return the optimizer of a model's trained parameters that `training.optim` names; over slices if it is sharded."""
    settings = AdamSettings(
        training.adam_beta1,
        training.adam_beta2,
        training.adam_epsilon,
        training.weight_decay,
    )
    # FSDP has cut them already: the optimizer is made last.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if any(isinstance(parameter, DTensor) for parameter in trained):
        return ShardedAdamW(model, settings)
    if training.optim == "adamw_8bit":
        return FlatAdamW8bit(model.named_parameters(), settings)
    return FlatAdamW(model.named_parameters(), settings)


class ShardedAdamW(FlatAdamW):
    """`FlatAdamW` over this rank's slices. Gradients arrive summed over all ranks, in `gradient`."""

    def __init__(self, model: nn.Module, settings: AdamSettings) -> None:
        self._slices: list[tuple[Any, Tensor]] = []  # (parameter, its part of `master`)
        self._moves_slices = can_move_slices(model)
        super().__init__(model.named_parameters(), settings)
        if self._moves_slices:
            # FSDP keeps views of the old memory until it looks again, by itself only before its first forward pass.
            for group in _groups(model):
                for parameter in group.fsdp_params:
                    parameter.reset_sharded_param()
        else:
            logs.MODEL.info(
                "this kubetune cannot move slices of torch %s: each rank keeps a second copy of the %s numbers that it "
                "trains",
                torch.__version__,
                f"{self.master.numel():,}",
            )

        # Slices that were not moved have to be refreshed. So has one that is shorter than other ranks', which FSDP pads
        # in other memory.
        self.copies.clear()
        for parameter, value in self._slices:
            if process_group.local(parameter).data_ptr() != value.data_ptr():
                self.copies.add(parameter, value)

    def _adopt(
        self,
        parameter: Any,
        value: Tensor,
        gradient: Tensor,
    ) -> None:
        value.copy_(process_group.local(parameter))
        # FSDP adds to an existing gradient in place, so it adds to the buffer.
        parameter.grad = DTensor.from_local(
            gradient,
            parameter.device_mesh,
            parameter.placements,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        if self._moves_slices:
            setattr(parameter, LOCAL, value)
        self._slices.append((parameter, value))

    @property
    def size(self) -> int:
        """Number of trained parameters of all ranks."""
        return sum(parameter.numel() for parameter, _ in self._slices)

    @property
    def sharing(self) -> int:
        """Number of ranks that a copy of the weights is cut over."""
        # The last dimension of a mesh is that of slices; the first of two is that of copies.
        mesh = self._slices[0][0].device_mesh
        return int(mesh.size(mesh.ndim - 1))

    @property
    def shards(self) -> list[OptimizerShard]:
        """Where the slices are in the whole model's buffers.

        Slices are whole rows, so each is one stretch of its parameter. `[5, 2]` at number 100, over 2 ranks:

            rank 0    rows 0 1 2    OptimizerShard(100, 6)
            rank 1    rows 3 4      OptimizerShard(106, 4)
        """
        # FSDP gives each rank equally many rows, rounded up, and the last ranks fewer or none.
        shards = []
        start = 0  # of the parameter in the whole model's buffers
        for parameter, value in self._slices:
            num_rows = parameter.shape[0]
            width = parameter.numel() // num_rows
            mesh = parameter.device_mesh
            rows_of_rank = math.ceil(num_rows / self.sharing)
            first_row = min(num_rows, mesh.get_local_rank(mesh.ndim - 1) * rows_of_rank)
            shards.append(OptimizerShard(start + first_row * width, value.numel()))
            start += parameter.numel()

        return shards

    def reduce_gradient(self, world: World) -> float:
        """Return the norm over the slices of all ranks. FSDP has summed the gradient already."""
        # Squares add up over ranks, norms do not.
        (squares,) = process_group.sum_numbers([sum_of_squares(self.gradient)], world)
        return math.sqrt(squares * self.sharing / world.size)


def can_move_slices(model: nn.Module) -> bool:
    """True if the installed torch has the names by which slices of a model can be moved to other memory."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and not hasattr(parameter, LOCAL):
            return False
    for module in model.modules():
        if isinstance(module, FSDPModule) and not hasattr(module, STATE):
            return False
    try:
        groups = list(_groups(model))
    except AttributeError:
        return False
    return bool(groups) and all(hasattr(group, "fsdp_params") for group in groups)


def _groups(model: nn.Module) -> Iterator[Any]:
    """Yield FSDP's groups of slices."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = getattr(module, STATE)()
            yield from getattr(state, GROUPS)
