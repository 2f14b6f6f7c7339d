"""The optimizer: every trained parameter, its gradient and AdamW's state in flat fp32 buffers.

Parameters keep their names, shapes and modules; only their storage moves. So a step has one norm, one all-reduce and
one fused update. In this example a weight w `[2, 2]`, a bias b `[2]`, and a norm's bf16 weight v `[2]` are trained:

    layout       w w w w | b b | v v        those that decay come first
    master       . . . . | . . | . .        w and b are views of it; v is copied from it after each update, so that
    gradient     . . . . | . . | . .        updates that bf16 would round away are not lost
    exp_avg      . . . . | . . | . .        w.grad and b.grad are views of `gradient`; v.grad is added to it in fp32
    exp_avg_sq   . . . . | . . | . .        as soon as autograd has it
                 0       4 = _decayed

Embedding tables of which few rows occur (occurring_rows.py) are stretches of the buffers that are left out; `around` yields
the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from kubetune.base import logs
from kubetune.distributed import process_group
from kubetune.distributed.process_group import World
from kubetune.training.optimizer import adam_step
from kubetune.training.optimizer.adam_step import AdamSettings, move
from kubetune.training.optimizer.occurring_rows import Collected, OccurringRows, around, occurring
from kubetune.training.optimizer.shards import OptimizerShard
from kubetune.training.optimizer.weight_copies import WeightCopies

# Numbers whose squares are added up in fp32: few enough that their norm is right to a part in ten million.
STRETCH = 2**12


def decays(name: str, parameter: Tensor) -> bool:
    """True if weight decay applies: not to biases and norms, which are vectors."""
    return parameter.dim() > 1 and not name.endswith("bias")


def sum_of_squares(vector: Tensor) -> float:
    """Add up the squares of an fp32 vector of any length without a copy of it: norms of stretches, summed in fp64.

    On a CPU one sum in fp32 over all of it would lose 2 % of 150 million squares, as each is small beside the sum.
    """
    # 10,000 numbers are two stretches of 4,096, and a rest of 1,808.
    whole = len(vector) // STRETCH * STRETCH
    stretches = vector[:whole].view(-1, STRETCH)
    norms = torch.linalg.vector_norm(stretches, dim=1)
    rest = torch.linalg.vector_norm(vector[whole:])
    return float(norms.double().square().sum() + rest.double().square())


def _trained(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
) -> list[tuple[str, nn.Parameter]]:
    """Return the trained parameters. Those that decay come first, so that each of the two kinds is one stretch."""
    named = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    if not named:
        raise ValueError("no trainable parameters")
    named.sort(key=lambda pair: not decays(*pair))
    return named


class FlatAdamW:
    """AdamW (arXiv 1711.05101) over flat buffers."""

    # Name -> shape of the trained parameters, in the order of the buffers.
    layout: dict[str, tuple[int, ...]]
    master: Tensor  # fp32 [parameters], as are the next three
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    # Sums of the gradients, which are views of `gradient`. kernels/cross_entropy.py adds to the head's directly.
    collected: dict[nn.Parameter, Collected]
    # The trained parameters, and where this rank's numbers of each are in the buffers.
    parts: list[tuple[nn.Parameter, slice]]

    def __init__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], settings: AdamSettings
    ) -> None:
        if adam_step.FUSED_STEP is None:
            logs.MODEL.info(
                "torch %s has no fused AdamW by the name that is known here: updates take longer",
                torch.__version__,
            )

        named = _trained(named_parameters)
        self.settings = settings
        self.layout = {name: tuple(parameter.shape) for name, parameter in named}

        parts = [process_group.local(parameter) for _, parameter in named]
        size = sum(part.numel() for part in parts)
        device = parts[0].device

        # The order of the buffers is that of a checkpoint's state: it depends on names and shapes alone.
        self.master = torch.zeros(size, device=device)
        self.gradient = torch.zeros(size, device=device)
        self.exp_avg = torch.zeros(size, device=device)
        self.exp_avg_sq = torch.zeros(size, device=device)
        self.step_count = torch.zeros((), device=device)  # a tensor, as the fused kernel needs it
        self.copies = WeightCopies()
        self.collected = {}
        self.parts = []
        self._decayed = 0  # numbers that weight decay applies to

        start = 0
        for (name, parameter), part in zip(named, parts, strict=True):
            span = slice(start, start + part.numel())
            value = self.master[span].view_as(part)
            gradient = self.gradient[span].view_as(part)
            self._adopt(parameter, value, gradient)
            self._watch(parameter, span)
            self.parts.append((parameter, span))
            start = span.stop
            if decays(name, parameter):
                self._decayed = start

    def _adopt(self, parameter: nn.Parameter, value: Tensor, gradient: Tensor) -> None:
        """Put a parameter and its gradient into the buffers: as views if it is fp32, else as copies."""
        value.copy_(parameter.data)
        collected = Collected(gradient)
        self.collected[parameter] = collected
        if parameter.dtype == torch.float32:
            parameter.data = value
            parameter.grad = gradient
            return

        # A hook, so that a gradient in bf16 exists only until it is added in fp32.
        def collect(p: Tensor) -> None:
            if p.grad is not None:
                collected.add(p.grad)
                p.grad = None

        parameter.register_post_accumulate_grad_hook(collect)
        self.copies.add(parameter, value)

    def _watch(self, parameter: nn.Parameter, span: slice) -> None:
        """Let only the rows that occur be updated, if a parameter is an embedding table that this suits."""
        collected = self.collected.get(parameter)
        if not collected or parameter.dtype == torch.float32 or self.settings.weight_decay:
            return  # weight decay changes every row
        if OccurringRows.fit(parameter, span):
            parts = tuple(part.view(parameter.shape) for part in self._buffers(span))
            collected.occurring = OccurringRows(parameter, span, parts)

    @property
    def size(self) -> int:
        """Number of trained parameters of the whole model."""
        return self.master.numel()

    @property
    def sharing(self) -> int:
        """Number of ranks that a copy of the weights is cut over."""
        return 1

    @property
    def shards(self) -> list[OptimizerShard]:
        """The stretches of the whole model's buffers that this rank holds."""
        return [OptimizerShard(0, self.master.numel())]

    def reduce_gradient(self, world: World) -> float:
        """Sum `gradient` over all ranks. Return its norm, the same on each."""
        if world.size > 1:
            for collected in self.collected.values():
                collected.opened()  # rows occur on other ranks that do not occur here
        process_group.sum_(self.gradient, world)
        return self.gradient_norm()

    def gradient_norm(self) -> float:
        """Return the norm of this rank's part of the gradient."""
        # Rows that occurred count with their own buffers, whose values are newer.
        parts = [self.gradient[span] for span in around(self.tables, len(self.gradient))]
        parts += [rows.gradient() for rows in self.tables]
        return math.sqrt(sum(sum_of_squares(part) for part in parts))

    def scale_gradient(self, factor: float, norm: float, largest: float) -> None:
        """Multiply the gradient by `factor`, after which its norm is `norm`, and clip it to `largest` (0: no limit)."""
        # Clipping and fp16's scale are one factor, so that the gradient is read once.
        if 0 < largest < norm:
            factor *= largest / norm
        if factor == 1.0:
            return
        for span in around(self.tables, len(self.gradient)):
            self.gradient[span].mul_(factor)
        for rows in self.tables:
            rows.buffers()[1].mul_(factor)

    def update(self, learning_rate: float) -> None:
        """Make one AdamW step from `gradient`, then set that to zero."""
        self.step_count += 1
        for span in around(self.tables, len(self.gradient)):
            # A stretch may have a part that decays and one that does not.
            middle = min(max(span.start, self._decayed), span.stop)
            decayed = self._buffers(slice(span.start, middle))
            others = self._buffers(slice(middle, span.stop))
            decay = self.settings.weight_decay
            move(decayed, self.step_count, learning_rate, self.settings, decay)
            move(others, self.step_count, learning_rate, self.settings, 0.0)

        for rows in self.tables:
            move(rows.buffers(), self.step_count, learning_rate, self.settings, 0.0)

        self.clear_gradient()
        self.copies.refresh(self.tables)

    def _buffers(self, span: slice) -> list[Tensor]:
        """Return a stretch of each of the four buffers."""
        buffers = (self.master, self.gradient, self.exp_avg, self.exp_avg_sq)
        return [buffer[span] for buffer in buffers]

    def moments_of(self, state: dict[str, Tensor], span: slice) -> Tensor:
        """Return, for each number of a stretch, whether it has moments."""
        return state["exp_avg"][span].bool() | state["exp_avg_sq"][span].bool()

    @property
    def tables(self) -> list[OccurringRows]:
        """The embedding tables that are updated row by row, since only some of their rows occur."""
        return occurring(self.collected.values())

    def clear_gradient(self) -> None:
        """Set the gradient to zero."""
        for span in around(self.tables, len(self.gradient)):
            self.gradient[span].zero_()
        for rows in self.tables:
            rows.clear_gradient()
        for collected in self.collected.values():
            collected.is_zero = True

    def mirror(self, copies: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        """Keep copies of trained parameters, of any dtype, equal to them from now on."""
        for parameter, copy in copies:
            self.copies.add(copy, process_group.local(parameter))
        self.copies.refresh(self.tables)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint needs to continue bit for bit."""
        # A checkpoint has whole buffers, so that it does not depend on which rows occurred.
        for rows in self.tables:
            rows.write_back()
        return {
            "master": self.master,
            "exp_avg": self.exp_avg,
            "exp_avg_sq": self.exp_avg_sq,
            "step_count": self.step_count,
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Load a checkpoint's state, and the weights from it. Raise ValueError if names, shapes or dtypes differ."""
        _copy_tensors(state, into=self.state())
        # Which rows have occurred is not in a checkpoint: it follows from the moments.
        tables = {}
        for parameter, collected in self.collected.items():
            if collected.occurring is not None:
                tables[parameter] = collected.occurring.read_again()
                collected.occurring = None  # so that `refresh` copies the whole table

        self.copies.refresh(self.tables)
        for parameter, rows in tables.items():
            self.collected[parameter].occurring = rows


def _copy_tensors(state: dict[str, Tensor], into: dict[str, Tensor]) -> None:
    """Copy the tensors of a checkpoint. Raise ValueError if names, shapes or dtypes differ."""
    for name in sorted(state.keys() - into.keys()):
        raise ValueError(f"optimizer state {name!r} is none of this optimizer's")
    for name, tensor in into.items():
        stored = state.get(name)
        if stored is None or stored.shape != tensor.shape or stored.dtype != tensor.dtype:
            raise ValueError(f"optimizer state {name!r} does not fit this model")
        tensor.copy_(stored)
