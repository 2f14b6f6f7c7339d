"""AdamW over the slices of a sharded model (FSDP2), and the choice of a run's optimizer."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from kubetune.config.schema import TrainingConfig
from kubetune.distributed import process_group
from kubetune.distributed.process_group import World
from kubetune.training.optimizer import adamw_8bit
from kubetune.training.optimizer.adamw import AdamSettings, FlatAdamW, sum_of_squares
from kubetune.training.optimizer.shards import OptimizerShard


def make_optimizer(model: nn.Module, training: TrainingConfig) -> FlatAdamW:
    """The optimizer of what is trained of a model: over slices where that is sharded."""
    if not any(isinstance(p, DTensor) and p.requires_grad for p in model.parameters()):
        return adamw_8bit.make_optimizer(model.named_parameters(), training)
    return ShardedAdamW(
        model,
        AdamSettings(
            training.adam_beta1, training.adam_beta2, training.adam_epsilon, training.weight_decay
        ),
    )


class ShardedAdamW(FlatAdamW):
    """`FlatAdamW` over this rank's slices. Gradients arrive summed over all ranks, in `gradient`."""

    def __init__(self, model: nn.Module, settings: AdamSettings) -> None:
        self._slices: list[tuple[Any, Tensor]] = []
        super().__init__(model.named_parameters(), settings)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                _renew(module)
        # A slice shorter than other ranks' is padded by FSDP in memory of its own: that one has to be refreshed.
        self._mirrors = [
            (p, value)
            for p, value in self._slices
            if process_group.local(p).data_ptr() != value.data_ptr()
        ]

    def _adopt(self, parameter: Any, value: Tensor, gradient: Tensor) -> None:
        value.copy_(process_group.local(parameter))
        parameter.grad = DTensor.from_local(
            gradient,
            parameter.device_mesh,
            parameter.placements,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        parameter._local_tensor = value
        self._slices.append((parameter, value))

    @property
    def size(self) -> int:
        """Trained parameters of all ranks."""
        return sum(p.numel() for p, _ in self._slices)

    @property
    def shards(self) -> list[OptimizerShard]:
        """Slices are whole rows, so each is one stretch of its parameter."""
        shards, start = [], 0
        for parameter, value in self._slices:
            rows, mesh = parameter.shape[0], parameter.device_mesh
            first = min(rows, mesh.get_local_rank() * -(-rows // mesh.size()))
            shards.append(
                OptimizerShard(start + first * (parameter.numel() // rows), value.numel())
            )
            start += parameter.numel()
        return shards

    def reduce_gradient(self, world: World) -> float:
        """The norm over the slices of all ranks."""
        return math.sqrt(process_group.sum_numbers([sum_of_squares(self.gradient)], world)[0])


def _renew(module: FSDPModule) -> None:
    """Let FSDP notice that slices have moved; it looks by itself only before its first forward."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for parameter in group.fsdp_params:
            parameter.reset_sharded_param()
