"""Linear layers of a mixture's experts, all of them in one product, with LoRA next to it; no expert's weight is changed.

Rows are sorted by the expert that they go to. Only the factors of adapters are multiplied: `B A` of all experts, as
large as these, is never made, neither in the forward nor in the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from kubetune.kernels import product_sizes

# Rows of grouped products, and of their factors, have to be multiples of so many bytes.
ALIGNED = 16


class ExpertRouting(NamedTuple):
    """Rows of tokens sorted by expert. A token has a row for each expert that it visits.

    Example: 3 tokens, 3 experts, 2 choices; token 0 chose the experts (2, 0), token 1 (0, 1), token 2 (2, 1):

        row before     0  1  2  3  4  5        token = row // 2
        its expert     2  0  0  1  2  1
        order          1  2  3  5  0  4        rows of expert 0, then 1, then 2
        experts        0  0  1  1  2  2
        ends           2  4  6                 expert 0 has the sorted rows 0:2, expert 1 2:4, expert 2 4:6
        back           4  0  1  2  5  3        row 0 is at 4 once sorted; token 0's rows are at 4 and 0
    """

    order: Tensor  # int64 [rows] which row is at each sorted place
    back: Tensor  # int64 [rows] the sorted place of each row, the inverse of `order`
    ends: Tensor  # int32 [experts] where the rows of each expert end
    experts: Tensor  # int64 [rows] the expert at each sorted place
    choices: int  # experts that a token visits


class Factors(NamedTuple):
    """A LoRA adapter of all experts in PEFT's layout."""

    a: Tensor  # [experts × rank, in]
    b: Tensor  # [out, rank × experts]
    scaling: float


def sort_by_expert(chosen: Tensor, experts: int) -> ExpertRouting:
    """Return the routing by the experts `[tokens, choices]` that each token has chosen."""
    ids, order = torch.sort(chosen.reshape(-1), stable=True)
    ends = torch.searchsorted(
        ids, torch.arange(experts, device=ids.device, dtype=ids.dtype), right=True
    )

    # The inverse of a permutation: what is at place i came from row order[i].
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return ExpertRouting(order, back, ends.to(torch.int32), ids, chosen.shape[-1])


def dispatch(x: Tensor, routing: ExpertRouting) -> Tensor:
    """Return the rows of tokens `[tokens, hidden]` sorted by expert, `[tokens × choices, hidden]`."""
    return cast(Tensor, _Dispatch.apply(x, routing))  # type: ignore[no-untyped-call]


def combine(y: Tensor, routing: ExpertRouting) -> Tensor:
    """Return for each token the sum of what its experts made of it; the transpose of `dispatch`."""
    return cast(Tensor, _Combine.apply(y, routing))  # type: ignore[no-untyped-call]


def weighted_swiglu(gate_up: Tensor, weights: Tensor) -> Tensor:
    """Return `weight · silu(gate) · up` of each row, which has gate and up side by side.

    Only the inputs are kept for the backward.
    """
    return cast(Tensor, _WeightedSwiGlu.apply(gate_up, weights))  # type: ignore[no-untyped-call]


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    routing: ExpertRouting,
    factors: Factors | None = None,
    *,
    transposed: bool = False,
) -> Tensor:
    """Return `x Wₑᵀ + s (x Aₑᵀ) Bₑᵀ` of each row by its expert e.

    `weight` is frozen if there are `factors`: `[experts, out, in]`, or `[experts, in, out]` if `transposed`.
    """
    if factors is None:
        factor = weight if transposed else weight.mT
        return F.grouped_mm(x, factor, offs=routing.ends)
    adapter = (factors.a, factors.b, routing.ends, factors.scaling, transposed)
    y = _GroupedLora.apply(x, weight, *adapter)  # type: ignore[no-untyped-call]
    return cast(Tensor, y)


class _Dispatch(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, routing: ExpertRouting) -> Tensor:
        ctx.routing = routing
        return _gathered(x, routing)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _summed(grad, ctx.routing), None


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, routing: ExpertRouting) -> Tensor:
        ctx.routing = routing
        return _summed(y, routing)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _gathered(grad, ctx.routing), None


def _gathered(x: Tensor, routing: ExpertRouting) -> Tensor:
    return x.index_select(0, routing.order // routing.choices)


def _summed(y: Tensor, routing: ExpertRouting) -> Tensor:
    # Where the rows of each token are once sorted, [tokens, choices].
    bags = routing.back.view(-1, routing.choices)
    if y.dtype == torch.float32 and y.device.type == "cpu":
        # In one pass, without a copy of all rows in between.
        return F.embedding_bag(bags, y, mode="sum")
    return y.index_select(0, routing.back).view(*bags.shape, -1).sum(1)


class _WeightedSwiGlu(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor) -> Tensor:
        # y = w · silu(g) · u, so that du = dy · w · silu(g), dw = Σ dy · silu(g) · u, dg = silu'(g) · (dy · w · u)
        ctx.save_for_backward(gate_up, weights)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up).mul_(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        gate_up, weights = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        d_gate_up = torch.empty_like(gate_up)
        d_gate, d_up = d_gate_up.chunk(2, -1)
        # All in the memory of the result: d_up holds dy · silu(g) until d_weights is made of it.
        torch.mul(grad, F.silu(gate), out=d_up)
        d_weights = torch.linalg.vecdot(d_up, up).unsqueeze(-1)
        d_up.mul_(weights)
        torch.ops.aten.silu_backward(grad.mul(weights).mul_(up), gate, grad_input=d_gate)
        return d_gate_up, d_weights


class _GroupedLora(Function):
    """Linear layers of all experts with their adapters.

    With s the scale, of each expert y = x Wᵀ + s (x Aᵀ) Bᵀ, so that
        dx = dy W + (s dy B) A        dA = (s dy B)ᵀ x        dB = s dyᵀ (x Aᵀ)
    as in `lora.lora_backward`, each product over the rows of one expert. Adapters are kept in fp32.
    The arithmetic is in x's dtype, but adapters are computed in fp32 if x has 16 bits on a CPU,
    see `_in_strides`.
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
        # Rows of x are sorted by expert, so that each product is one over all experts.
        rows = _exact(x)
        down, up = _stacked(a, b, len(weight), rows)
        y = _grouped(x, weight if transposed else weight.mT, ends)

        # The scale goes to the narrow product, which has the fewest numbers.
        low = F.grouped_mm(rows, down.mT, offs=ends).mul_(scaling)
        y.add_(F.grouped_mm(low, up.mT, offs=ends))
        ctx.save_for_backward(x, low, weight, a, b, ends)
        ctx.scaling = scaling
        ctx.transposed = transposed
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, low, weight, a, b, ends = ctx.saved_tensors
        grad = grad.contiguous()
        experts = len(weight)
        rank = len(a) // experts
        rows = _exact(grad)
        down, up = _stacked(a, b, experts, rows)

        d_low = F.grouped_mm(rows, up, offs=ends).mul_(ctx.scaling)
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = _grouped(grad, weight.mT if ctx.transposed else weight, ends)
            d_x.add_(F.grouped_mm(d_low, down, offs=ends))
        # Ranks beyond `rank` are the padding of `_stacked`.

        d_down = F.grouped_mm(d_low.t(), _exact(x), offs=ends)[:, :rank].float()
        d_a = d_down.reshape(a.shape)
        d_up = F.grouped_mm(rows.t(), low, offs=ends)[..., :rank].float()
        d_b = d_up.reshape(experts, -1).t().reshape(b.shape)
        return d_x, None, d_a, d_b, None, None, None


def _is_compiled_by_size(x: Tensor) -> bool:
    return product_sizes.compiles_each_size(x.device.type, x.element_size())


def _exact(x: Tensor) -> Tensor:
    if _is_compiled_by_size(x):
        return x.float()
    return x


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if _is_compiled_by_size(x):
        return _in_strides(x, weight, ends.tolist())
    return F.grouped_mm(x, weight, offs=ends)


def _in_strides(
    x: Tensor,
    weight: Tensor,
    ends: Sequence[int],
) -> Tensor:
    """Return the grouped product, made of products of the few sizes in `product_sizes.STRIDES`.

    Example: 40 rows, of which the expert has 20:37. The stride for 17 rows is 32, but row 20 + 32 is
    after the last one. So the product is made of the rows 8:40, and of it 12:29 are kept: rows of
    other experts, before or after, are computed and dropped.
    """
    y = x.new_empty(len(x), weight.shape[-1])
    start = 0
    for expert, end in enumerate(ends):
        # Every stride but an expert's last is the largest one.
        while start < end:
            stride = _stride(end - start)
            first = max(0, min(start, len(x) - stride))
            stop = min(start + stride, end)
            product = x[first : first + stride] @ weight[expert]
            y[start:stop] = product[start - first : stop - first]
            start = stop

    return y


def _stride(rows: int) -> int:
    """Return the smallest stride that holds `rows`, or the largest one."""
    for stride in product_sizes.STRIDES:
        if stride >= rows:
            return stride
    return product_sizes.STRIDES[-1]


def _stacked(
    a: Tensor,
    b: Tensor,
    experts: int,
    x: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the factors `[experts, rank, in]` and `[experts, out, rank]` in x's dtype.

    Ranks are padded by zeros to what `ALIGNED` asks for.
    """
    down = a.to(x.dtype).view(experts, -1, a.shape[-1])
    # As a matrix it is transposed in blocks, seven times as fast as a permutation of three dimensions.
    up = b.to(x.dtype).view(-1, experts).t().contiguous().view(experts, len(b), -1)

    missing = -down.shape[1] % (ALIGNED // x.element_size())
    if missing:
        down = F.pad(down, (0, 0, 0, missing))
        up = F.pad(up, (0, missing))
    return down, up
