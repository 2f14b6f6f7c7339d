"""Attention of sequences that continue shared beginnings, by kernels that keep no scores: in parts, then joined.

A sequence attends to itself (causal) and to each of its beginnings (all of it). Sequences lie in the order of a
PrefixTree, so that everything that continues a beginning is one stretch of queries, and a kernel reads the beginning
once for all of them. The rows "s s b b" and "s s a" share the beginning s s:

    place in the batch   0 1 2 3 4
    token                s s b b a      sequences: 0 = s s, 1 = b b, 2 = a; parents -1, 0, 0

    part 0   each sequence sees itself:            queries 0:2, 2:4, 4:5   keys 0:2, 2:4, 4:5   causal
    part 1   what continues s s sees all of it:    queries 2:5             keys 0:2             not causal

A kernel gives the output of each part with its log-sum-exp, the logarithm of the sum of e^score. By these the parts are
weighted. If token a has the log-sum-exp 1.0 in part 0 and 2.0 in part 1, the sum of both is ln(e^1 + e^2) = 2.31:

    output of a = e^(1.0 - 2.31) × its output in part 0 + e^(2.0 - 2.31) × its output in part 1
                = 0.27 × … + 0.73 × …

The backward of a part, given the output and the log-sum-exp of all parts together, gives the part's share of the
gradient, as in ring attention (arXiv 2310.01889).
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache, lru_cache
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function

from kubetune.base import logs
from kubetune.kernels.attention.blockwise import zeros_in_fp32

Span = tuple[int, int]

# torch's kernels, by private names. A version of torch that lacks one computes by blockwise.py.
FLASH_ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"
FLASH_ON_CPU_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
VARLEN_BACKWARD = "_varlen_attn_backward"


class JoinedPart(NamedTuple):
    """Stretches of queries, and for each of them the stretch of keys that it sees."""

    queries: Tensor  # int64 [queries] places in the batch, one stretch after the other
    keys: Tensor  # int64 [keys] the same of keys
    cu_queries: tuple[int, ...]  # [stretches + 1] where stretches of queries begin and end
    cu_keys: tuple[int, ...]  # [stretches + 1] the same of keys
    on_device: tuple[Tensor, Tensor]  # cu_queries and cu_keys, int32, where the batch is
    causal: bool  # True if a query sees its stretch only up to itself

    @property
    def longest(self) -> tuple[int, int]:
        """Return the lengths of the longest stretches of queries and of keys."""
        return _longest(self.cu_queries), _longest(self.cu_keys)


def _longest(ends: tuple[int, ...]) -> int:
    return max(stop - start for start, stop in pairwise(ends))


@lru_cache(maxsize=4)
def parts(
    cu_seqlens: tuple[int, ...],
    parents: tuple[int, ...],
    device: torch.device,
) -> tuple[JoinedPart, ...]:
    """Return the parts of a packed batch: each sequence with itself, then the beginnings, one part for each depth."""
    # Sequences 0 = s s, 1 = t (continues 0), 2 = b b (from 1) and 3 = a (from 0), with parents -1, 0, 1, 0:
    #
    #     place      0 1 2 3 4 5
    #     token      s s t b b a       depths 0, 1, 2, 1      ends 6, 5, 5, 6
    #
    #     part 0     everybody sees itself
    #     part 1     what continues s s, places 2:6, sees the places 0:2             (beginnings of depth 0)
    #     part 2     what continues t, places 3:5, sees the place 2:3                (beginnings of depth 1)
    #
    # Beginnings of one depth are in one part, as no token continues two of them.
    spans = list(pairwise(cu_seqlens))

    depths = [0] * len(parents)  # how many beginnings a sequence has; parents come first
    for number, parent in enumerate(parents):
        if parent >= 0:
            depths[number] = depths[parent] + 1

    # Backwards, so that an end has come up from all that continues a sequence.
    ends = list(cu_seqlens[1:])  # where the last sequence that continues each one ends
    for number in reversed(range(len(parents))):
        parent = parents[number]
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[number])

    result = [_part(spans, spans, device, causal=True)]
    for depth in range(max(depths)):
        queries: list[Span] = []
        keys: list[Span] = []
        for number, (start, stop) in enumerate(spans):
            if depths[number] == depth and ends[number] > stop:
                queries.append((stop, ends[number]))
                keys.append((start, stop))
        result.append(_part(queries, keys, device, causal=False))

    return tuple(result)


def _part(
    queries: list[Span],
    keys: list[Span],
    device: torch.device,
    *,
    causal: bool,
) -> JoinedPart:
    # Kernels take both: numbers on the device, and where Python cuts.
    cu_queries = _cumulated_lengths(queries)
    cu_keys = _cumulated_lengths(keys)
    return JoinedPart(
        queries=_places(queries).to(device),
        keys=_places(keys).to(device),
        cu_queries=tuple(cu_queries.tolist()),
        cu_keys=tuple(cu_keys.tolist()),
        on_device=(cu_queries.to(device, torch.int32), cu_keys.to(device, torch.int32)),
        causal=causal,
    )


def _places(spans: list[Span]) -> Tensor:
    return torch.cat([torch.arange(start, stop) for start, stop in spans])


def _cumulated_lengths(spans: list[Span]) -> Tensor:
    return torch.tensor([0, *(stop - start for start, stop in spans)]).cumsum(0)


@cache
def is_available(device: str) -> bool:
    """True if the installed torch has the kernels for a type of device, "cpu" or "cuda"."""
    if device == "cpu":
        kernels = torch.ops.aten
        names = [FLASH_ON_CPU, FLASH_ON_CPU_BACKWARD]
    else:
        with suppress(ImportError):
            import_module("torch.nn.attention.varlen")  # registers them
        kernels = torch.ops.torch_attn
        names = [VARLEN_BACKWARD]
    if all(hasattr(kernels, name) for name in names):
        return True
    logs.MODEL.info(
        "torch %s has no attention kernel by a name that is known here: long rows with shared beginnings take memory for "
        "all scores of a layer",
        torch.__version__,
    )
    return False


class OnCPU:
    """torch's flash kernel for CPUs, a stretch at a time; keys are repeated for the heads that share them.

    Attention of a part: q `[queries, heads, dim]`, k and v `[keys, kv_heads, dim]`, log-sum-exps `[heads, queries]`.
    `forward` returns the output, like q, and the log-sum-exps, fp32. `backward` returns the gradients of q, k and v;
    its `out` and `lse` are of all parts together, and `grad` is the gradient of `out`.
    """

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        part: JoinedPart,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        heads = q.shape[1]
        out = torch.empty_like(q)
        lse = q.new_empty(heads, q.shape[0], dtype=torch.float32)
        kernel = getattr(torch.ops.aten, FLASH_ON_CPU)
        for rows, columns in _stretches(part):
            stretch_out, stretch_lse = kernel(
                _batch(q[rows]),
                _batch(k[columns], heads),
                _batch(v[columns], heads),
                0.0,
                part.causal,
                scale=scale,
            )
            out[rows] = stretch_out[0].transpose(0, 1)
            lse[:, rows] = stretch_lse[0]

        return out, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        part: JoinedPart,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = q.shape[1]
        # The stretches of a part cover all of its queries and keys: every place is written.
        d_q = torch.empty_like(q)
        d_k = torch.empty_like(k)
        d_v = torch.empty_like(v)
        kernel = getattr(torch.ops.aten, FLASH_ON_CPU_BACKWARD)
        for rows, columns in _stretches(part):
            rows_d_q, columns_d_k, columns_d_v = kernel(
                _batch(grad[rows]),
                _batch(q[rows]),
                _batch(k[columns], heads),
                _batch(v[columns], heads),
                _batch(out[rows]),
                lse[None, :, rows],
                0.0,
                part.causal,
                scale=scale,
            )
            d_q[rows] = rows_d_q[0].transpose(0, 1)
            d_k[columns] = _sum_of_repeats(columns_d_k, k.shape[1])
            d_v[columns] = _sum_of_repeats(columns_d_v, v.shape[1])

        return d_q, d_k, d_v


class OnGPU:
    """torch's varlen kernel, with the same two methods."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        part: JoinedPart,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        out_and_lse = varlen_attn(
            q,
            k,
            v,
            *part.on_device,
            *part.longest,
            return_aux=AuxRequest(lse=True),
            scale=scale,
            window_size=(-1, 0 if part.causal else -1),
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return cast(tuple[Tensor, Tensor], out_and_lse)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        part: JoinedPart,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # The kernel asks for the state of dropout. There is none.
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        kernel = getattr(torch.ops.torch_attn, VARLEN_BACKWARD)
        gradients = kernel(
            grad,
            q,
            k,
            v,
            out,
            lse,
            *part.on_device,
            *part.longest,
            part.causal,
            no_dropout,
            scale,
            [-1, 0 if part.causal else -1],
        )
        return cast(tuple[Tensor, Tensor, Tensor], gradients)


def _stretches(part: JoinedPart) -> list[tuple[slice, slice]]:
    """Return each stretch of queries with its stretch of keys."""
    stretches = []
    for queries, keys in zip(pairwise(part.cu_queries), pairwise(part.cu_keys), strict=True):
        stretches.append((slice(*queries), slice(*keys)))
    return stretches


def _batch(x: Tensor, heads: int | None = None) -> Tensor:
    """Return `[1, heads, n, dim]` of `[n, heads, dim]`, each head repeated if `heads` are more."""
    if heads is not None and heads != x.shape[1]:
        x = x.repeat_interleave(heads // x.shape[1], 1)
    return x.transpose(0, 1)[None]


def _sum_of_repeats(gradient: Tensor, kv_heads: int) -> Tensor:
    """Return `[n, kv_heads, dim]` of `[1, heads, n, dim]`, summed over the repeats of each head."""
    total: Tensor = gradient[0].unflatten(0, (kv_heads, -1)).sum(1)
    return total.transpose(0, 1)


def joined_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: tuple[int, ...],
    parents: tuple[int, ...],
    scale: float,
) -> Tensor:
    """Return the causal attention of each sequence within itself and its beginnings, as block_attention has it."""
    kernel = OnGPU() if q.is_cuda else OnCPU()
    all_parts = parts(cu_seqlens, parents, q.device)
    return cast(Tensor, _Joined.apply(q, k, v, all_parts, scale, kernel))  # type: ignore[no-untyped-call]


class _Joined(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        all_parts: tuple[JoinedPart, ...],
        scale: float,
        kernel: OnCPU | OnGPU,
    ) -> Tensor:
        q = q.contiguous()
        k = k.contiguous()
        v = v.contiguous()
        # Part 0 holds all queries in their order, so that its output and its log-sum-exps are what the others add to.
        part_out, lse = kernel.forward(q, k, v, all_parts[0], scale)
        total = part_out.float()
        for part in all_parts[1:]:
            rows = part.queries
            part_out, part_lse = kernel.forward(
                q[rows],
                k[part.keys],
                v[part.keys],
                part,
                scale,
            )

            # Both outputs by their share of the sum, as the top of this file shows.
            before = lse[:, rows]
            after = torch.logaddexp(before, part_lse)
            weighted = total[rows] * _weight(before, after)
            total[rows] = weighted + part_out.float() * _weight(part_lse, after)
            lse[:, rows] = after

        out = total.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.all_parts = all_parts
        ctx.scale = scale
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        # In fp32, as each part adds its share.
        d_q = zeros_in_fp32(q)
        d_k = zeros_in_fp32(k)
        d_v = zeros_in_fp32(v)
        for part in ctx.all_parts:
            rows = part.queries
            columns = part.keys
            part_d_q, part_d_k, part_d_v = ctx.kernel.backward(
                grad[rows],
                q[rows],
                k[columns],
                v[columns],
                out[rows],
                lse[:, rows],
                part,
                ctx.scale,
            )
            # Within a part no place occurs twice, so that `+=` at these indices loses nothing.
            d_q[rows] += part_d_q
            d_k[columns] += part_d_k
            d_v[columns] += part_d_v

        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), None, None, None


def _weight(lse: Tensor, lse_of_all: Tensor) -> Tensor:
    """Return the weight of a part's output, `[queries, heads, 1]`, of log-sum-exps `[heads, queries]`."""
    return (lse - lse_of_all).exp().t()[..., None]
