"""Causal convolution over a few tokens, each channel by itself, of sequences laid end to end."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


class Boundaries(NamedTuple):
    """First tokens of sequences, whose filters would reach into the sequence before: `rows` `[n]` of the packed batch,
    what their filters see, `taps` `[n, width]`, the oldest first, and where that is of their own sequence, `own`; where
    sequences begin and end, `cu_seqlens`."""

    rows: Tensor
    taps: Tensor
    own: Tensor
    cu_seqlens: tuple[int, ...]


@lru_cache(maxsize=4)
def boundaries(cu_seqlens: tuple[int, ...], width: int, device: torch.device) -> Boundaries:
    """Boundaries of a packed batch, for filters of `width` tokens."""
    spans = pairwise(cu_seqlens)
    found = [(row, start) for start, stop in spans for row in range(start, min(start + width - 1, stop))]
    rows, starts = torch.tensor(found, dtype=torch.long).reshape(-1, 2).t()
    taps = rows[:, None] + torch.arange(1 - width, 1)
    own = taps >= starts[:, None]
    return Boundaries(rows.to(device), taps.clamp(min=0).to(device), own.to(device), cu_seqlens)


def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Sequence[int], *, silu: bool
) -> Tensor:
    """`x` `[tokens, channels]` filtered by `weight` `[channels, width]`, `silu` of it where that is asked for."""
    found = boundaries(tuple(cu_seqlens), weight.shape[1], x.device)
    return cast(Tensor, _ShortConvolution.apply(x, weight, bias, found, silu))  # type: ignore[no-untyped-call]


def _silu(y: Tensor, cu_seqlens: tuple[int, ...]) -> Tensor:
    """silu of `[tokens, channels]`. A CPU rounds the last tokens of a channel otherwise than those it takes several of
    at once: each sequence's lie as where it is alone."""
    lying = y.t().contiguous()
    made = torch.empty_like(lying)
    for start, stop in pairwise(cu_seqlens):
        torch.ops.aten.silu.out(lying[:, start:stop], out=made[:, start:stop])
    return made.t()


class _ShortConvolution(Function):
    """Filters as shifted products of the whole stream, in fp32, the oldest token's first, by which they are rounded as
    those of torch's own convolution; rows at boundaries are made anew."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, edge: Boundaries, silu: bool) -> Tensor:
        wide, taps = x.float(), weight.float().t().contiguous()
        y, last = torch.zeros_like(wide), len(taps) - 1
        for n, tap in enumerate(taps):
            y[last - n :].addcmul_(wide[: len(wide) - (last - n)], tap)
        seen = wide[edge.taps] * edge.own[..., None]
        first = torch.zeros_like(seen[:, 0])
        for n, tap in enumerate(taps):
            first.addcmul_(seen[:, n], tap)
        y.index_copy_(0, edge.rows, first)
        if bias is not None:
            y.add_(bias.float())
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, taps, y if silu else None)
        ctx.edge, ctx.dtypes = edge, (x.dtype, weight.dtype, bias)
        if silu:
            exact = y.device.type == "cpu" and x.dtype is torch.float32
            return (_silu(y, edge.cu_seqlens) if exact else F.silu(y)).to(x.dtype)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, taps, y = ctx.saved_tensors
        edge: Boundaries = ctx.edge
        dtype, weight_dtype, bias = ctx.dtypes
        wide = grad.float()
        d_y = wide.clone() if y is None else torch.ops.aten.silu_backward(wide, y)
        d_bias = d_y.sum(0).to(bias.dtype) if ctx.needs_input_grad[2] else None
        at_boundary = d_y[edge.rows][:, None] * edge.own[..., None]
        d_y.index_fill_(0, edge.rows, 0.0)
        d_x = d_y * taps[-1]
        for shift, tap in enumerate(reversed(taps[:-1].unbind()), start=1):
            d_x[:-shift].addcmul_(d_y[shift:], tap)
        d_x.index_add_(0, edge.taps.flatten(), (at_boundary * taps).flatten(0, 1))
        d_weight = None
        if x is not None:
            seen, width = x.float(), len(taps)
            within = [(d_y[width - 1 - n :] * seen[: len(seen) - (width - 1 - n)]).sum(0) for n in range(width)]
            d_taps = torch.stack(within) + (at_boundary * seen[edge.taps]).sum(0)
            d_weight = d_taps.t().to(weight_dtype)
        return d_x.to(dtype), d_weight, d_bias, None, None
