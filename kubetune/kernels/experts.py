"""Linear layers of a mixture's experts, all of them in one product, with LoRA beside; no expert's weight is changed.

Rows are sorted by the expert that they go to. Of adapters only the factors are multiplied: `B A` of all experts, as
large as these, is never made, neither in the forward nor in the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

ALIGNED = 16
"""Bytes that rows of grouped products are multiples of, those of factors too."""
STRIDES = (16, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Rows of products where their code is made by size: few, that all of it is kept (`cpu.KEPT_PRODUCTS`)."""


class Routing(NamedTuple):
    """Rows of tokens sorted by expert. A token has a row for each expert that it visits.

    Example: 3 tokens, 3 experts, 2 choices; token 0 chose the experts (2, 0), token 1 (0, 1), token 2 (2, 1):

        row before     0  1  2  3  4  5        token = row // 2
        its expert     2  0  0  1  2  1
        order          1  2  3  5  0  4        rows of expert 0, then 1, then 2
        experts        0  0  1  1  2  2
        ends           2  4  6                 expert 0 has the sorted rows 0:2, expert 1 2:4, expert 2 4:6
        back           4  0  1  2  5  3        row 0 stands at 4 once sorted; token 0's rows are at 4 and 0
    """

    order: Tensor  # int64 [rows] which row stands at each sorted place
    back: Tensor  # int64 [rows] the sorted place of each row, the inverse of `order`
    ends: Tensor  # int32 [experts] where the rows of each expert end
    experts: Tensor  # int64 [rows] the expert at each sorted place
    choices: int  # experts that a token visits


class Factors(NamedTuple):
    """A LoRA adapter of all experts in PEFT's layout."""

    a: Tensor  # [experts × rank, in]
    b: Tensor  # [out, rank × experts]
    scaling: float


def sort_by_expert(chosen: Tensor, experts: int) -> Routing:
    """Return the routing by the experts `[tokens, choices]` that each token has chosen."""
    ids, order = torch.sort(chosen.reshape(-1), stable=True)
    ends = torch.searchsorted(
        ids, torch.arange(experts, device=ids.device, dtype=ids.dtype), right=True
    )
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return Routing(order, back, ends.to(torch.int32), ids, chosen.shape[-1])


def dispatch(x: Tensor, routing: Routing) -> Tensor:
    """Return the rows of tokens `[tokens, hidden]` sorted by expert, `[tokens × choices, hidden]`."""
    return cast(Tensor, _Dispatch.apply(x, routing))  # type: ignore[no-untyped-call]


def combine(y: Tensor, routing: Routing) -> Tensor:
    """Return for each token the sum of what its experts made of it; the transpose of `dispatch`."""
    return cast(Tensor, _Combine.apply(y, routing))  # type: ignore[no-untyped-call]


def weighted_swiglu(gate_up: Tensor, weights: Tensor) -> Tensor:
    """`weight · silu(gate) · up` of each row, which has gate and up side by side; keeps only its inputs."""
    return cast(Tensor, _WeightedSwiGlu.apply(gate_up, weights))  # type: ignore[no-untyped-call]


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    routing: Routing,
    factors: Factors | None = None,
    *,
    transposed: bool = False,
) -> Tensor:
    """`x Wₑᵀ + s (x Aₑᵀ) Bₑᵀ` of each row by its expert e.

    `weight` is frozen where there are `factors`: `[experts, out, in]`, or `[experts, in, out]` where `transposed`.
    """
    if factors is None:
        return F.grouped_mm(x, weight if transposed else weight.mT, offs=routing.ends)
    adapter = (factors.a, factors.b, routing.ends, factors.scaling, transposed)
    found = _GroupedLora.apply(x, weight, *adapter)  # type: ignore[no-untyped-call]
    return cast(Tensor, found)


class _Dispatch(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        return _gathered(x, routing)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _summed(grad, ctx.routing), None


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        return _summed(y, routing)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _gathered(grad, ctx.routing), None


def _gathered(x: Tensor, routing: Routing) -> Tensor:
    return x.index_select(0, routing.order // routing.choices)


def _summed(y: Tensor, routing: Routing) -> Tensor:
    bags = routing.back.view(-1, routing.choices)
    if y.dtype == torch.float32 and y.device.type == "cpu":
        return F.embedding_bag(
            bags, y, mode="sum"
        )  # in one pass, without a copy of all rows in between
    return y.index_select(0, routing.back).view(*bags.shape, -1).sum(1)


class _WeightedSwiGlu(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up).mul_(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        gate_up, weights = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        found = torch.empty_like(gate_up)
        d_gate, d_up = found.chunk(2, -1)
        torch.mul(grad, F.silu(gate), out=d_up)
        d_weights = torch.linalg.vecdot(d_up, up).unsqueeze(-1)
        d_up.mul_(weights)
        torch.ops.aten.silu_backward(grad.mul(weights).mul_(up), gate, grad_input=d_gate)
        return found, d_weights


class _GroupedLora(Function):
    """With s the scale, of each expert y = x Wᵀ + s (x Aᵀ) Bᵀ, so that
        dx = dy W + (s dy B) A        dA = (s dy B)ᵀ x        dB = s dyᵀ (x Aᵀ)
    as in `pointwise.lora_backward`, each product over the rows of one expert. Adapters are kept in fp32; the arithmetic
    is in x's dtype, but in fp32 beside frozen weights of 16 bits on a CPU, see `_in_strides`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        a: Tensor,
        b: Tensor,
        ends: Tensor,
        scaling: float,
        transposed: bool,
    ) -> Tensor:
        rows = _exact(x)
        down, up = _stacked(a, b, len(weight), rows)
        y = _grouped(x, weight if transposed else weight.mT, ends)
        low = F.grouped_mm(rows, down.mT, offs=ends).mul_(scaling)
        y.add_(F.grouped_mm(low, up.mT, offs=ends))
        ctx.save_for_backward(x, low, weight, a, b, ends)
        ctx.scaling, ctx.transposed = scaling, transposed
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, low, weight, a, b, ends = ctx.saved_tensors
        grad, experts = grad.contiguous(), len(weight)
        rank, rows = len(a) // experts, _exact(grad)
        down, up = _stacked(a, b, experts, rows)
        d_low = F.grouped_mm(rows, up, offs=ends).mul_(ctx.scaling)
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = _grouped(grad, weight.mT if ctx.transposed else weight, ends)
            d_x.add_(F.grouped_mm(d_low, down, offs=ends))
        d_a = F.grouped_mm(d_low.t(), _exact(x), offs=ends)[:, :rank].float().reshape(a.shape)
        d_up = F.grouped_mm(rows.t(), low, offs=ends)[..., :rank].float().reshape(experts, -1)
        return d_x, None, d_a, d_up.t().reshape(b.shape), None, None, None


def _is_compiled_by_size(x: Tensor) -> bool:
    """16 bits on a CPU, where oneDNN makes code for each size of a product, which takes longer than a small product."""
    return x.device.type == "cpu" and x.element_size() == 2


def _exact(x: Tensor) -> Tensor:
    return x.float() if _is_compiled_by_size(x) else x


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if _is_compiled_by_size(x):
        return _in_strides(x, weight, ends.tolist())
    return F.grouped_mm(x, weight, offs=ends)


def _in_strides(x: Tensor, weight: Tensor, ends: Sequence[int]) -> Tensor:
    """Grouped product in few sizes: rows of other experts, before or behind, are taken along and left out again."""
    y, start = x.new_empty(len(x), weight.shape[-1]), 0
    for expert, end in enumerate(ends):
        while start < end:
            stride = next((each for each in STRIDES if each >= end - start), STRIDES[-1])
            first, stop = max(0, min(start, len(x) - stride)), min(start + stride, end)
            product = x[first : first + stride] @ weight[expert]
            y[start:stop] = product[start - first : stop - first]
            start = stop
    return y


def _stacked(a: Tensor, b: Tensor, experts: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Factors `[experts, rank, in]` and `[experts, out, rank]` in the dtype of the arithmetic."""
    down = a.to(x.dtype).view(experts, -1, a.shape[-1])
    # As a matrix it is turned in blocks, seven times as fast as by a permutation of three dimensions.
    up = b.to(x.dtype).view(-1, experts).t().contiguous().view(experts, len(b), -1)
    missing = -down.shape[1] % (ALIGNED // x.element_size())
    return (F.pad(down, (0, 0, 0, missing)), F.pad(up, (0, missing))) if missing else (down, up)
