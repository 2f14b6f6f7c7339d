"""A frozen linear layer in bitsandbytes' 4 or 8 bits with its LoRA adapter, in as many tensors as a plain one needs.

PEFT copies the layer's output, for fear of views, and adds the adapter's part to it in three more tensors as large.
These are freed between tensors that autograd keeps, and leave holes in the heap, as large as all that is kept. So
would the weight that each product makes again on a CPU. It is therefore made outside the heap, or after the output:

    heap    [kept] [output, kept] [weight, freed]     the next weight fits where this one was
            [kept] [weight, freed] [output, kept]     a hole that the next, larger weight does not fit into
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.autograd import Function

from kubetune.base.cpu import heap
from kubetune.kernels.lora import Adapters, Layer, flattened, lora_backward, lora_forward


class Bits(Protocol):
    """A weight `[out, in]` that is held in few bits."""

    def times(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product of `rows` and the transposed weight, plus `bias`."""

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, which holds until the next call."""


class FourBits(NamedTuple):
    """A weight of bitsandbytes' 4 bits."""

    codes: Tensor
    state: Any  # bitsandbytes' QuantState, which tells how to read the codes

    def times(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply; on a GPU by a kernel that never makes the weight."""
        # A CPU has to make the weight, at a place that leaves no hole in the heap.
        if rows.device.type == "cpu":
            return _times_weight(self, rows, bias, self.state.shape[0])
        from bitsandbytes import matmul_4bit  # type: ignore[attr-defined]

        # As bitsandbytes' own layer does.
        if bias is not None:
            bias = bias.to(rows.dtype)
        return cast(Tensor, matmul_4bit(rows, self.codes, quant_state=self.state, bias=bias))

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight as bitsandbytes makes it."""
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(self.codes, self.state).to(dtype)


class EightBits(NamedTuple):
    """A weight of bitsandbytes' 8 bits, on a CPU. Inputs are not rounded."""

    codes: Tensor  # int8 [out, in], 127 for the scale of the row
    scales: Tensor  # [out] the largest absolute weight of each row

    def times(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply as bitsandbytes trains on a CPU."""
        return _times_weight(self, rows, bias, len(self.codes))

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight outside the heap, rounded as bitsandbytes rounds it."""
        weight = _room(self.codes.numel(), dtype).view_as(self.codes)
        return weight.copy_(self.codes).mul_(self.scales.unsqueeze(1).mul(1.0 / 127.0))


def _times_weight(
    bits: Bits,
    rows: Tensor,
    bias: Tensor | None,
    width: int,
) -> Tensor:
    # Made before the weight: after it, it would keep the freed weight's memory from being used again.
    y = rows.new_empty(len(rows), width)
    weight = bits.weight(rows.dtype).t()
    if bias is None:
        return torch.mm(rows, weight, out=y)
    return torch.addmm(bias.to(rows.dtype), rows, weight, out=y)


# Memory of each dtype for the largest weight so far.
_ROOMS: dict[torch.dtype, Tensor] = {}


def _room(size: int, dtype: torch.dtype) -> Tensor:
    """Return memory for `size` numbers; all weights of a dtype use the same, one after the other."""
    # The room grows with the largest weight, and then stays: layers of a model repeat their sizes.
    if dtype not in _ROOMS or len(_ROOMS[dtype]) < size:
        _ROOMS[dtype] = torch.frombuffer(heap.outside_heap(size * dtype.itemsize), dtype=dtype)
    return _ROOMS[dtype][:size]


def _times_transposed(
    bits: Bits,
    total: Tensor | None,
    d_y: Tensor,
) -> Tensor:
    # Made again: keeping it since the forward would take the memory that few bits save.
    weight = bits.weight(d_y.dtype)
    if total is None:
        return d_y @ weight
    return total.addmm_(d_y, weight)


class _LoraLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        adapters: Adapters,
        bits: Bits,
        *flat: Tensor | None,
    ) -> tuple[Tensor, ...]:
        # No tensor, so autograd need not keep it.
        ctx.bits = bits
        return lora_forward(ctx, bits.times, x, adapters, *flat)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        # `bits` is the third argument of the forward; its codes are frozen.
        d_x, d_adapters, *others = lora_backward(ctx, partial(_times_transposed, ctx.bits), grads)
        return d_x, d_adapters, None, *others


def lora_linear(
    x: Tensor,
    layer: Layer,
    adapters: Adapters,
    bits: Bits,
) -> Tensor:
    """Return the output of a layer with the weight `bits`."""
    (y,) = _LoraLinear.apply(x, adapters, bits, *flattened([layer]))  # type: ignore[no-untyped-call]
    return cast(Tensor, y)
