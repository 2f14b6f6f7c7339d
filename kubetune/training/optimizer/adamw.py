"""The optimizer: every trained parameter, its gradient and AdamW's state in flat fp32 buffers.

Parameters stay what they are (names, shapes, modules); only their storage moves. One norm, one all-reduce and one
fused update per step, and updates that bf16 weights would round away are kept by the fp32 master copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kubetune.distributed import process_group
from kubetune.distributed.process_group import World
from kubetune.training.optimizer.rows import Collected, OccurringRows
from kubetune.training.optimizer.shards import OptimizerShard

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
    stretches = (
        torch.linalg.vector_norm(vector[:whole].view(-1, STRETCH), dim=1).double().square().sum()
    )
    return float(stretches + torch.linalg.vector_norm(vector[whole:]).double().square())


class FlatAdamW:
    """AdamW (arXiv 1711.05101) over flat buffers.

    `master`, `gradient`, `exp_avg`, `exp_avg_sq`: fp32 `[parameters]`, ordered by `layout`. Parameters that are fp32
    themselves are views of `master`; others (bf16 full fine-tuning) are refreshed from it after each update, and
    their gradients are collected into `gradient` in fp32 as soon as autograd has them.
    """

    def __init__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], settings: AdamSettings
    ) -> None:
        named = sorted(
            ((name, p) for name, p in named_parameters if p.requires_grad),
            key=lambda pair: not decays(*pair),
        )
        if not named:
            raise ValueError("no trainable parameters")
        self.settings = settings
        self.layout = {name: tuple(p.shape) for name, p in named}
        held = [process_group.local(p) for _, p in named]
        size, device = sum(part.numel() for part in held), held[0].device
        self.master, self.gradient, self.exp_avg, self.exp_avg_sq = (
            torch.zeros(size, device=device) for _ in range(4)
        )
        self.step_count = torch.zeros((), device=device)
        self._mirrors: list[tuple[Tensor, Tensor]] = []
        self.collected: dict[
            nn.Parameter, Collected
        ] = {}  # kernels/cross_entropy.py adds to the head's directly
        self._decayed = sum(
            part.numel() for (name, p), part in zip(named, held, strict=True) if decays(name, p)
        )
        start = 0
        for (_, parameter), part in zip(named, held, strict=True):
            span = slice(start, start + part.numel())
            self._adopt(
                parameter, self.master[span].view_as(part), self.gradient[span].view_as(part)
            )
            self._watch(parameter, span)
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

    def _watch(self, parameter: nn.Parameter, span: slice) -> None:
        """Let a table of words be moved by the rows that occur; decay moves all."""
        collected, is_moved_whole = self.collected.get(parameter), bool(self.settings.weight_decay)
        if (
            collected
            and parameter.dtype != torch.float32
            and not is_moved_whole
            and OccurringRows.fit(parameter, span)
        ):
            parts = tuple(part.view(parameter.shape) for part in self._buffers(span))
            collected.occurring = OccurringRows(parameter, span, parts)

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
        if world.size > 1:
            for collected in self.collected.values():
                collected.opened()  # other ranks have other rows
        process_group.sum_(self.gradient, world)
        return self.gradient_norm()

    def gradient_norm(self) -> float:
        """The norm of what this rank holds of the gradient."""
        parts = [self.gradient[span] for span in self._around()] + [
            rows.gradient() for rows in self._occurring()
        ]
        return math.sqrt(sum(sum_of_squares(part) for part in parts))

    def scale_gradient(self, factor: float, norm: float, largest: float) -> None:
        """Multiply the gradient by `factor`, which makes its norm `norm`, and clip that to `largest` (0: never)."""
        if 0 < largest < norm:
            factor *= largest / norm
        if factor != 1.0:
            rest = [self.gradient[span] for span in self._around()]
            for part in (*rest, *(rows.buffers()[1] for rows in self._occurring())):
                part.mul_(factor)

    def update(self, learning_rate: float) -> None:
        """One AdamW step from `gradient`, which is zeroed afterwards."""
        self.step_count += 1
        for span in self._around():
            middle = min(max(span.start, self._decayed), span.stop)
            self._move(
                self._buffers(slice(span.start, middle)), learning_rate, self.settings.weight_decay
            )
            self._move(self._buffers(slice(middle, span.stop)), learning_rate, 0.0)
        for rows in self._occurring():
            self._move(rows.buffers(), learning_rate, 0.0)
        self.clear_gradient()
        self._refresh()

    def _buffers(self, span: slice) -> list[Tensor]:
        return [
            buffer[span] for buffer in (self.master, self.gradient, self.exp_avg, self.exp_avg_sq)
        ]

    def _move(self, buffers: Sequence[Tensor], learning_rate: float, decay: float) -> None:
        """Move what stands in parts of the four buffers by a step."""
        master, gradient, exp_avg, exp_avg_sq = buffers
        if len(master):
            # The fused kernel itself: torch.optim.AdamW imports torch._dynamo, which costs a second of start-up.
            torch._fused_adamw_(
                [master],
                [gradient],
                [exp_avg],
                [exp_avg_sq],
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

    def clear_gradient(self) -> None:
        """Forget what was added up, so that the next gradient is the first."""
        for span in self._around():
            self.gradient[span].zero_()
        for rows in self._occurring():
            rows.clear_gradient()
        for collected in self.collected.values():
            collected.is_zero = True

    def _occurring(self) -> list[OccurringRows]:
        return [
            c.occurring for c in self.collected.values() if c.occurring and not c.occurring.is_empty
        ]

    def _around(self) -> Iterator[slice]:
        """Stretches of the buffers between tables whose rows are moved by themselves."""
        start = 0
        for rows in self._occurring():
            yield slice(start, rows.span.start)
            start = rows.span.stop
        yield slice(start, len(self.gradient))

    def mirror(self, copies: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        """Keep copies of trained parameters, of whatever dtype, equal to them from now on."""
        self._mirrors += [(copy, process_group.local(parameter)) for parameter, copy in copies]
        self._refresh()

    def _refresh(self) -> None:
        tables = self._occurring()
        for rows in tables:
            rows.refresh()
        mirrors = [
            (p, value) for p, value in self._mirrors if not any(p is rows.weight for rows in tables)
        ]
        if mirrors:
            torch._foreach_copy_(
                [process_group.local(p) for p, _ in mirrors], [value for _, value in mirrors]
            )

    def state(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint needs to go on bit by bit."""
        for rows in self._occurring():
            rows.write_back()
        return {
            name: getattr(self, name) for name in ("master", "exp_avg", "exp_avg_sq", "step_count")
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over a checkpoint's state; parameters follow. Raises ValueError when sizes differ."""
        for name, tensor in self.state().items():
            if name not in state or (state[name].shape, state[name].dtype) != (
                tensor.shape,
                tensor.dtype,
            ):
                raise ValueError(f"optimizer state {name!r} does not fit this model")
            tensor.copy_(state[name])
        found = [
            collected.occurring and collected.occurring.read_again()
            for collected in self.collected.values()
        ]
        for collected in self.collected.values():
            collected.occurring = None  # for once all weights follow what was loaded
        self._refresh()
        for collected, rows in zip(self.collected.values(), found, strict=True):
            collected.occurring = rows
