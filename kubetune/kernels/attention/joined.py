"""Attention of sequences that go on from shared beginnings by kernels that keep no scores: in parts, then joined.

A sequence attends to itself (causal) and to each of its beginnings (all of it). Kernels give each part's output with
its log-sum-exp, by which the parts are weighted; and a part's backward, given the output and the log-sum-exp of all,
gives that part's share of the gradient, as in ring attention (arXiv 2310.01889). Sequences lie in the order of a
PrefixTree, so that all that goes on from a beginning is one stretch of queries: a kernel sees the beginning once.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.autograd import Function


class Part(NamedTuple):
    """Stretches of queries and the stretch of keys that each sees, end to end; `causal`: each sees itself.

    `queries` and `keys`: where they stand in the batch, int64; `cu_queries` and `cu_keys`: where stretches begin and
    end, as numbers and, for GPUs, on the device.
    """

    queries: Tensor
    keys: Tensor
    cu_queries: tuple[int, ...]
    cu_keys: tuple[int, ...]
    on_device: tuple[Tensor, Tensor]
    causal: bool

    @property
    def longest(self) -> tuple[int, int]:
        """Lengths of the longest stretches of queries and of keys."""
        return max(b - a for a, b in pairwise(self.cu_queries)), max(b - a for a, b in pairwise(self.cu_keys))


@lru_cache(maxsize=4)
def parts(cu_seqlens: tuple[int, ...], parents: tuple[int, ...], device: torch.device) -> tuple[Part, ...]:
    """Parts of the attention of a packed batch: each sequence to itself, then those beginnings that are as deep."""
    ends, depths = list(cu_seqlens[1:]), [0] * len(parents)
    for number, parent in enumerate(parents):
        depths[number] = depths[parent] + 1 if parent >= 0 else 0
    for number, parent in reversed(list(enumerate(parents))):
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[number])
    own = list(pairwise(cu_seqlens))
    found = [_part(own, own, device, causal=True)]
    for depth in range(max(depths)):
        begun = [n for n in range(len(parents)) if depths[n] == depth and ends[n] > own[n][1]]
        found.append(_part([(own[n][1], ends[n]) for n in begun], [own[n] for n in begun], device, causal=False))
    return tuple(found)


def _part(queries: list[tuple[int, int]], keys: list[tuple[int, int]], device: torch.device, *, causal: bool) -> Part:
    places = [torch.cat([torch.arange(*span) for span in spans]).to(device) for spans in (queries, keys)]
    ends = [torch.tensor([0, *(b - a for a, b in spans)]).cumsum(0) for spans in (queries, keys)]
    cu_queries, cu_keys = (tuple(end.tolist()) for end in ends)
    on_device = (ends[0].to(device, torch.int32), ends[1].to(device, torch.int32))
    return Part(places[0], places[1], cu_queries, cu_keys, on_device, causal)


class Kernel(Protocol):
    """Attention of a part. Shapes: q `[queries, heads, dim]`, k and v `[keys, kv_heads, dim]`, log-sum-exps
    `[heads, queries]`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, part: Part, scale: float) -> tuple[Tensor, Tensor]:
        """Output like q, and log-sum-exps, fp32."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: Part, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v by those of the joint output `out`, whose log-sum-exps are `lse`."""


class OnCPU:
    """torch's flash kernel for CPUs, a stretch at a time; keys are repeated for the heads that share them."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, part: Part, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
        for rows, columns in _stretches(part):
            inputs = (_batch(q[rows]), *(_batch(x[columns], q.shape[1]) for x in (k, v)))
            found, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *inputs, 0.0, part.causal, scale=scale
            )
            out[rows], lse[:, rows] = found[0].transpose(0, 1), sums[0]
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: Part, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        d_q, d_k, d_v = (torch.empty_like(x) for x in (q, k, v))
        for rows, columns in _stretches(part):
            inputs = (_batch(q[rows]), *(_batch(x[columns], q.shape[1]) for x in (k, v)))
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _batch(grad[rows]), *inputs, _batch(out[rows]), lse[None, :, rows], 0.0, part.causal, scale=scale
            )
            d_q[rows] = found[0][0].transpose(0, 1)
            for total, whole in ((d_k, found[1][0]), (d_v, found[2][0])):
                total[columns] = whole.unflatten(0, (k.shape[1], -1)).sum(1).transpose(0, 1)
        return d_q, d_k, d_v


class OnGPU:
    """torch's varlen kernel."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, part: Part, scale: float) -> tuple[Tensor, Tensor]:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        found = varlen_attn(
            q, k, v, *part.on_device, *part.longest,
            return_aux=AuxRequest(lse=True), scale=scale, window_size=(-1, 0 if part.causal else -1),
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        return cast(tuple[Tensor, Tensor], found)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: Part, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of dropout, of which there is none
        found = torch.ops.torch_attn._varlen_attn_backward(
            grad, q, k, v, out, lse, *part.on_device, *part.longest, part.causal, unused, scale,
            [-1, 0 if part.causal else -1],
        )  # fmt: skip
        return cast(tuple[Tensor, Tensor, Tensor], found)


def _stretches(part: Part) -> list[tuple[slice, slice]]:
    spans = zip(pairwise(part.cu_queries), pairwise(part.cu_keys), strict=True)
    return [(slice(*rows), slice(*columns)) for rows, columns in spans]


def _batch(x: Tensor, heads: int | None = None) -> Tensor:
    """`[n, heads, dim]` -> `[1, heads, n, dim]`."""
    if heads is not None and heads != x.shape[1]:
        x = x.repeat_interleave(heads // x.shape[1], 1)
    return x.transpose(0, 1)[None]


def joined_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple[int, ...], parents: tuple[int, ...], scale: float
) -> Tensor:
    """Causal attention of each sequence within itself and its beginnings, as block_attention has it."""
    kernel = OnGPU() if q.is_cuda else OnCPU()
    return cast(Tensor, _Joined.apply(q, k, v, parts(cu_seqlens, parents, q.device), scale, kernel))  # type: ignore[no-untyped-call]


class _Joined(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, whole: tuple[Part, ...], scale: float, kernel: Kernel
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        found, sums = kernel.forward(q, k, v, whole[0], scale)
        total = found.float()
        for part in whole[1:]:
            found, own = kernel.forward(q[part.queries], k[part.keys], v[part.keys], part, scale)
            before = sums[:, part.queries]
            after = torch.logaddexp(before, own)
            kept, added = ((each - after).exp().t()[..., None] for each in (before, own))
            total[part.queries] = total[part.queries] * kept + found.float() * added
            sums[:, part.queries] = after
        out = total.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.whole, ctx.scale, ctx.kernel = whole, scale, kernel
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        grad = grad.contiguous()
        totals = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v)]
        for part in ctx.whole:
            rows, columns = part.queries, part.keys
            found = ctx.kernel.backward(
                grad[rows], q[rows], k[columns], v[columns], out[rows], sums[:, rows], part, ctx.scale
            )
            for total, places, piece in zip(totals, (rows, columns, columns), found, strict=True):
                total[places] += piece  # of a part, each place stands there once
        return (*(total.to(x.dtype) for total, x in zip(totals, (q, k, v), strict=True)), None, None, None)
