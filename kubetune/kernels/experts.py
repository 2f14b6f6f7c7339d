"""Linear layers of a mixture's experts, all of them in one product, with LoRA beside; no expert's weight is changed.

Rows are sorted by the expert that they go to. Of adapters only the factors are multiplied: `B A` of all experts, as
large as these, is never made, neither in the forward nor in the backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

ALIGNED = 8
"""Ranks are multiples of this on GPUs, whose grouped products want rows of whole 16 bytes."""


class Routing(NamedTuple):
    """Rows of tokens sorted by expert. `order` `[rows]`: their places before, `back` its inverse, `ends` `[experts]`:
    where the rows of each expert end, `experts` `[rows]`: whose each is, `choices`: experts that a token visits."""

    order: Tensor
    back: Tensor
    ends: Tensor
    experts: Tensor
    choices: int


class Factors(NamedTuple):
    """A LoRA adapter of all experts in PEFT's layout: `a` `[experts × rank, in]`, `b` `[out, rank × experts]`."""

    a: Tensor
    b: Tensor
    scaling: float


def sort_by_expert(chosen: Tensor, experts: int) -> Routing:
    """Routing by the experts `[tokens, choices]` that each token has chosen."""
    ids, order = torch.sort(chosen.reshape(-1), stable=True)
    ends = torch.searchsorted(ids, torch.arange(experts, device=ids.device, dtype=ids.dtype), right=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return Routing(order, back, ends.to(torch.int32), ids, chosen.shape[-1])


def dispatch(x: Tensor, routing: Routing) -> Tensor:
    """Rows of tokens `[tokens, hidden]` as the experts take them: `[tokens × choices, hidden]`, sorted."""
    return cast(Tensor, _Dispatch.apply(x, routing))  # type: ignore[no-untyped-call]


def combine(y: Tensor, weights: Tensor, routing: Routing) -> Tensor:
    """Sum, for each token, of what its experts made of it, by the weights `[tokens, choices]` it gives them."""
    if _sums_bags(y) and weights.dtype == y.dtype:
        return cast(Tensor, _Combine.apply(y, weights, routing))  # type: ignore[no-untyped-call]
    found: Tensor = _Permute.apply(y, routing.back, routing.order)  # type: ignore[no-untyped-call]
    back = found.view(*weights.shape, -1)
    return (back * weights.unsqueeze(-1)).sum(1)


def grouped_linear(
    x: Tensor, weight: Tensor, routing: Routing, factors: Factors | None = None, *, transposed: bool = False
) -> Tensor:
    """`x Wₑᵀ + s (x Aₑᵀ) Bₑᵀ` of each row by its expert e.

    `weight` is frozen where there are `factors`: `[experts, out, in]`, or `[experts, in, out]` where `transposed`.
    """
    if factors is None:
        return F.grouped_mm(x, weight if transposed else weight.mT, offs=routing.ends)
    adapter = (factors.a, factors.b, routing.ends, factors.scaling, transposed)
    found = _GroupedLora.apply(x, weight, *adapter)  # type: ignore[no-untyped-call]
    return cast(Tensor, found)


def _sums_bags(y: Tensor) -> bool:
    """Presence of a kernel that gathers rows and sums them in one pass, without a copy of them all in between."""
    return y.dtype == torch.float32 and y.device.type == "cpu"


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, routing: Routing) -> Tensor:
        ctx.save_for_backward(y, weights, routing.order, routing.back)
        return F.embedding_bag(routing.back.view(weights.shape), y, mode="sum", per_sample_weights=weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        y, weights, order, back = ctx.saved_tensors
        rows = grad.index_select(0, order // weights.shape[1])
        d_weights = torch.linalg.vecdot(rows, y)[back].view(weights.shape)
        return rows.mul_(weights.reshape(-1)[order].unsqueeze(-1)), d_weights, None


class _Permute(Function):
    """Rows in another order; by its inverse the gradient needs no sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class _Dispatch(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, routing: Routing) -> Tensor:
        ctx.save_for_backward(routing.back)
        ctx.choices = routing.choices
        return x.index_select(0, routing.order // routing.choices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (back,) = ctx.saved_tensors
        if _sums_bags(grad):
            return F.embedding_bag(back.view(-1, ctx.choices), grad, mode="sum"), None
        return grad.index_select(0, back).view(-1, ctx.choices, grad.shape[-1]).sum(1), None


class _GroupedLora(Function):
    """With s the scale, of each expert y = x Wᵀ + s (x Aᵀ) Bᵀ, so that
        dx = dy W + (s dy B) A        dA = (s dy B)ᵀ x        dB = s dyᵀ (x Aᵀ)
    as in `pointwise.lora_backward`, each product over the rows of one expert. Adapters are kept in fp32, the arithmetic
    is in x's dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, ends: Tensor, scaling: float, transposed: bool
    ) -> Tensor:
        down, up = _stacked(a, b, len(weight), x)
        y = F.grouped_mm(x, weight if transposed else weight.mT, offs=ends)
        low = F.grouped_mm(x, down.mT, offs=ends)
        y.add_(F.grouped_mm(low, up, offs=ends), alpha=scaling)
        ctx.save_for_backward(x, low, weight, a, b, ends)
        ctx.scaling, ctx.transposed = scaling, transposed
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, low, weight, a, b, ends = ctx.saved_tensors
        grad, rank = grad.contiguous(), len(a) // len(weight)
        down, up = _stacked(a, b, len(weight), x)
        d_low = F.grouped_mm(grad, up.mT, offs=ends).mul_(ctx.scaling)
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = F.grouped_mm(grad, weight.mT if ctx.transposed else weight, offs=ends)
            d_x.add_(F.grouped_mm(d_low, down, offs=ends))
        d_down = F.grouped_mm(d_low.t(), x, offs=ends)[:, :rank].float()
        d_up = F.grouped_mm(low.t(), grad, offs=ends)[:, :rank].float().mul_(ctx.scaling)
        return d_x, None, d_down.reshape(a.shape), d_up.permute(2, 1, 0).reshape(b.shape), None, None, None


def _stacked(a: Tensor, b: Tensor, experts: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Factors `[experts, rank, in]` and `[experts, rank, out]` in the dtype of the arithmetic."""
    down = a.to(x.dtype).view(experts, -1, a.shape[-1])
    up = b.to(x.dtype).view(len(b), -1, experts).permute(2, 1, 0).contiguous()
    missing = padded_rank(down.shape[1], x) - down.shape[1]
    return (F.pad(down, (0, 0, 0, missing)), F.pad(up, (0, 0, 0, missing))) if missing else (down, up)


def padded_rank(rank: int, x: Tensor) -> int:
    """Rank that factors are filled up to with zeros, for the device of x."""
    return rank + -rank % ALIGNED if x.is_cuda else rank
