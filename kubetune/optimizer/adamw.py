"""The optimizer: every trained parameter, its gradient and AdamW's state in flat fp32 buffers.

Parameters stay what they are (names, shapes, modules); only their storage moves. One norm, one all-reduce and one
fused update per step, and updates that bf16 weights would round away are kept by the fp32 master copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kubetune.distributed import process_group
from kubetune.distributed.process_group import World
from kubetune.optimizer.shards import OptimizerShard

STRETCH = 2**12
"""Numbers whose squares are added up in fp32: few enough that their norm is right to a part in ten million."""


@dataclass(frozen=True)
class AdamSettings:
    """AdamW's constants, with the names of the config."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0


def decays(name: str, parameter: Tensor) -> bool:
    """Weight decay of a parameter: none for biases and norms, which are vectors."""
    return parameter.dim() > 1 and not name.endswith("bias")


def sum_of_squares(vector: Tensor) -> float:
    """Of an fp32 vector of any length, without a copy of it: norms of stretches, which are put together in fp64.

    On a CPU one sum in fp32 over all of it would lose 2 % of 150 million squares, as each is small beside the sum.
    """
    whole = len(vector) // STRETCH * STRETCH
    stretches = torch.linalg.vector_norm(vector[:whole].view(-1, STRETCH), dim=1).double().square().sum()
    return float(stretches + torch.linalg.vector_norm(vector[whole:]).double().square())


@dataclass
class Collected:
    """Sum of one parameter's gradient in fp32: a part of the optimizer's `gradient`."""

    gradient: Tensor
    is_zero: bool = True

    def add(self, gradient: Tensor) -> None:
        """Add what autograd made, of whatever dtype, dense or of some rows."""
        # Adding bf16 to fp32 first makes an fp32 copy: four times the work of writing it where nothing is yet.
        if gradient.is_sparse:
            self.opened().index_add_(0, gradient._indices()[0], gradient._values().float())
        elif self.is_zero:
            self.opened().copy_(gradient)
        else:
            self.gradient.add_(gradient)

    def opened(self) -> Tensor:
        """The sum, for those who add to it themselves (kernels/cross_entropy.py)."""
        self.is_zero = False
        return self.gradient


class FlatAdamW:
    """AdamW (arXiv 1711.05101) over flat buffers.

    `master`, `gradient`, `exp_avg`, `exp_avg_sq`: fp32 `[parameters]`, ordered by `layout`. Parameters that are fp32
    themselves are views of `master`; others (bf16 full fine-tuning) are refreshed from it after each update, and
    their gradients are collected into `gradient` in fp32 as soon as autograd has them.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], settings: AdamSettings) -> None:
        named = sorted(
            ((name, p) for name, p in named_parameters if p.requires_grad), key=lambda pair: not decays(*pair)
        )
        if not named:
            raise ValueError("no trainable parameters")
        self.settings = settings
        self.layout = {name: tuple(p.shape) for name, p in named}
        held = [process_group.local(p) for _, p in named]
        size, device = sum(part.numel() for part in held), held[0].device
        self.master, self.gradient, self.exp_avg, self.exp_avg_sq = (torch.zeros(size, device=device) for _ in range(4))
        self.step_count = torch.zeros((), device=device)
        self._mirrors: list[tuple[Tensor, Tensor]] = []
        self.collected: dict[nn.Parameter, Collected] = {}  # kernels/cross_entropy.py adds to the head's directly
        self._decayed = sum(part.numel() for (name, p), part in zip(named, held, strict=True) if decays(name, p))
        start = 0
        for (_, parameter), part in zip(named, held, strict=True):
            span = slice(start, start + part.numel())
            self._adopt(parameter, self.master[span].view_as(part), self.gradient[span].view_as(part))
            start = span.stop

    def _adopt(self, parameter: nn.Parameter, value: Tensor, gradient: Tensor) -> None:
        """Put a parameter and its gradient into the buffers: those in fp32 live there, others are copied there."""
        value.copy_(parameter.data)
        collected = Collected(gradient)
        self.collected[parameter] = collected
        if parameter.dtype == torch.float32:
            parameter.data, parameter.grad = value, gradient
            return

        def collect(p: Tensor) -> None:
            if p.grad is not None:
                collected.add(p.grad)
                p.grad = None

        parameter.register_post_accumulate_grad_hook(collect)
        self._mirrors.append((parameter, value))

    @property
    def size(self) -> int:
        """Trained parameters of the whole model."""
        return self.master.numel()

    @property
    def shards(self) -> list[OptimizerShard]:
        """Stretches that this rank's buffers hold of the buffers of the whole model."""
        return [OptimizerShard(0, self.master.numel())]

    def reduce_gradient(self, world: World) -> float:
        """Add `gradient` over all ranks; returns its norm, the same on each."""
        process_group.sum_(self.gradient, world)
        return self.gradient_norm()

    def gradient_norm(self) -> float:
        """The norm of what this rank holds of the gradient."""
        return math.sqrt(sum_of_squares(self.gradient))

    def scale_gradient(self, factor: float, norm: float, largest: float) -> None:
        """Multiply the gradient by `factor`, which makes its norm `norm`, and clip that to `largest` (0: never)."""
        if 0 < largest < norm:
            factor *= largest / norm
        if factor != 1.0:
            self.gradient.mul_(factor)

    def update(self, learning_rate: float) -> None:
        """One AdamW step from `gradient`, which is zeroed afterwards."""
        self.step_count += 1
        for span, decay in ((slice(0, self._decayed), self.settings.weight_decay), (slice(self._decayed, None), 0.0)):
            if len(self.master[span]):
                # The fused kernel itself: torch.optim.AdamW imports torch._dynamo, which costs a second of start-up.
                torch._fused_adamw_(
                    [self.master[span]],
                    [self.gradient[span]],
                    [self.exp_avg[span]],
                    [self.exp_avg_sq[span]],
                    [],
                    [self.step_count],
                    lr=learning_rate,
                    beta1=self.settings.beta1,
                    beta2=self.settings.beta2,
                    weight_decay=decay,
                    eps=self.settings.epsilon,
                    amsgrad=False,
                    maximize=False,
                )
        self.clear_gradient()
        self._refresh()

    def clear_gradient(self) -> None:
        """Forget what was added up, so that the next gradient is the first."""
        self.gradient.zero_()
        for collected in self.collected.values():
            collected.is_zero = True

    def mirror(self, copies: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        """Keep copies of trained parameters, of whatever dtype, equal to them from now on."""
        self._mirrors += [(copy, process_group.local(parameter)) for parameter, copy in copies]
        self._refresh()

    def _refresh(self) -> None:
        if self._mirrors:
            torch._foreach_copy_([process_group.local(p) for p, _ in self._mirrors], [v for _, v in self._mirrors])

    def state(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint needs to go on bit by bit."""
        return {name: getattr(self, name) for name in ("master", "exp_avg", "exp_avg_sq", "step_count")}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over a checkpoint's state; parameters follow. Raises ValueError when sizes differ."""
        for name, tensor in self.state().items():
            if name not in state or (state[name].shape, state[name].dtype) != (tensor.shape, tensor.dtype):
                raise ValueError(f"optimizer state {name!r} does not fit this model")
            tensor.copy_(state[name])
        self._refresh()
