"""A frozen linear layer in bitsandbytes' 4 or 8 bits with its LoRA adapter, in as many tensors as a plain one needs.

PEFT copies what the layer gives, for fear of views, and adds the adapter's part to it in three more tensors as large.
Between those that autograd keeps, what is given back leaves holes as large as all that is kept. So would the weight
that each product makes anew on a CPU, which is therefore made outside the heap, or after what the product gives.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.autograd import Function

from kubetune.base import cpu
from kubetune.kernels.lora import Adapters, Layer, flattened, lora_backward, lora_forward


class Bits(Protocol):
    """A weight `[out, in]` for which few bits stand."""

    def times(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Product of `rows` and the weight, transposed."""

    def weight(self, dtype: torch.dtype) -> Tensor:
        """The weight, until the next is asked for."""


class FourBits(NamedTuple):
    """Codes that `state` says how to read."""

    codes: Tensor
    state: Any

    def times(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """On a GPU by a kernel that never makes the weight."""
        if rows.device.type == "cpu":
            return _times_weight(self, rows, bias, self.state.shape[0])
        from bitsandbytes.autograd._functions import matmul_4bit

        bias = None if bias is None else bias.to(rows.dtype)
        return cast(Tensor, matmul_4bit(rows, self.codes, quant_state=self.state, bias=bias))

    def weight(self, dtype: torch.dtype) -> Tensor:
        """As bitsandbytes makes it."""
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(self.codes, self.state).to(dtype)


class EightBits(NamedTuple):
    """Codes of 127 to the largest weight of a row, which is its scale, on a CPU; inputs are not rounded."""

    codes: Tensor
    scales: Tensor

    def times(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """As bitsandbytes trains on a CPU."""
        return _times_weight(self, rows, bias, len(self.codes))

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Outside the heap, rounded as bitsandbytes rounds it."""
        found = _room(self.codes.numel(), dtype).view_as(self.codes)
        return found.copy_(self.codes).mul_(self.scales.unsqueeze(1).mul(1.0 / 127.0))


def _times_weight(bits: Bits, rows: Tensor, bias: Tensor | None, width: int) -> Tensor:
    given = rows.new_empty(
        len(rows), width
    )  # before the weight, lest it come to lie behind what will be a hole
    weight = bits.weight(rows.dtype).t()
    if bias is None:
        return torch.mm(rows, weight, out=given)
    return torch.addmm(bias.to(rows.dtype), rows, weight, out=given)


_ROOMS: dict[torch.dtype, Tensor] = {}


def _room(size: int, dtype: torch.dtype) -> Tensor:
    """The room of all weights of a dtype, which has grown to the largest."""
    if dtype not in _ROOMS or len(_ROOMS[dtype]) < size:
        _ROOMS[dtype] = torch.frombuffer(cpu.outside_heap(size * dtype.itemsize), dtype=dtype)
    return _ROOMS[dtype][:size]


def _times_transposed(bits: Bits, total: Tensor | None, d_y: Tensor) -> Tensor:
    weight = bits.weight(d_y.dtype)
    return d_y @ weight if total is None else total.addmm_(d_y, weight)


class _LoraLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, adapters: Adapters, bits: Bits, *flat: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.bits = bits
        return lora_forward(ctx, bits.times, x, adapters, *flat)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        d_x, d_adapters, *others = lora_backward(ctx, partial(_times_transposed, ctx.bits), grads)
        return d_x, d_adapters, None, *others


def lora_linear(x: Tensor, layer: Layer, adapters: Adapters, bits: Bits) -> Tensor:
    """Output of a layer whose weight is given in `bits`."""
    (found,) = _LoraLinear.apply(x, adapters, bits, *flattened([layer]))  # type: ignore[no-untyped-call]
    return cast(Tensor, found)
