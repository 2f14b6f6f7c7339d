"""Exact attention over a packed batch from batched matrix products, for CPUs (and odd cases on GPUs).

For short sequences this is several times faster than SDPA one by one and far faster than a block-diagonal mask:
query groups are folded into rows so that keys and values are never repeated, row blocks skip most of the upper
triangle, and the probabilities are kept in the dtype of the inputs. Not for long sequences: memory is O(length²).
Beginnings that sequences share are in the batch once, and each of them sees them there.

Example: sequences a (5 tokens) and b (2), causal, as if a block had 2 queries. x is computed and used, - computed and
hidden, and blanks are never computed:

    keys        a0 a1 a2 a3 a4 b0 b1
    block 0 a0   x  -                       Block(0, 2, keys 0:2, distance 0)
            a1   x  x
    block 1 a2   x  x  x  -                 Block(2, 4, keys 0:4, distance 2)
            a3   x  x  x  x
    block 2 a4   x  x  x  x  x              Block(4, 5, keys 0:5, distance 4)
    block 3 b0                  x  -        Block(5, 7, keys 5:7, distance 0)
            b1                  x  x

If b continued a (`parents` (-1, 0)), block 3 would see the keys 0:5 and 5:7, and be at distance 5.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

ROWS = 256  # queries of a block
# torch's backward of a softmax. None if this version of torch has it no more: then three operations do the same.
SOFTMAX_BACKWARD: Any = getattr(torch, "_softmax_backward_data", None)


class Rule(NamedTuple):
    """Attention as a model asks for it; 0 means none."""

    scale: float
    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    dropout: float = 0.0  # of the probabilities; for padded.py, block attention has none


class Block(NamedTuple):
    """Queries `[first, end)` of a sequence, and the keys that they see."""

    first: int
    end: int
    spans: tuple[slice, ...]  # of keys, which lie end to end in the sequence
    distance: int  # how far in the sequence the first query is behind the first of these keys

    @property
    def size(self) -> tuple[int, int]:
        """Return the numbers of queries and of keys."""
        return self.end - self.first, _length(self.spans)


def _length(spans: tuple[slice, ...]) -> int:
    return sum(span.stop - span.start for span in spans)


def paths(
    cu_seqlens: tuple[int, ...], parents: tuple[int, ...] = ()
) -> Iterator[tuple[slice, ...]]:
    """Yield where the tokens of each sequence are in a packed batch: its shared beginnings, then its own."""
    # "s s" shared by "b b" and "a", with cu_seqlens (0, 2, 4, 5) and parents (-1, 0, 0): (0:2), (0:2, 2:4), (0:2, 4:5)
    all_paths: list[tuple[slice, ...]] = []
    for number, (start, stop) in enumerate(pairwise(cu_seqlens)):
        path = (slice(start, stop),)
        if parents and parents[number] >= 0:
            path = all_paths[parents[number]] + path
        all_paths.append(path)
        yield path


def _blocks(
    cu_seqlens: tuple[int, ...],
    rule: Rule,
    parents: tuple[int, ...] = (),
) -> Iterator[Block]:
    for path in paths(cu_seqlens, parents):
        before = path[:-1]
        last = path[-1]
        offset = _length(before) - last.start  # from places in the batch to places in the sequence
        for first in range(last.start, last.stop, ROWS):
            end = min(first + ROWS, last.stop)
            first_key = max(0, first + offset - rule.window + 1) if rule.window else 0
            last_key = last.stop
            if rule.causal:
                last_key = end
            elif rule.window:
                last_key = min(last.stop, end + rule.window - 1)
            spans = _without_first((*before, slice(last.start, last_key)), first_key)
            yield Block(first, end, spans, first + offset - first_key)


def _without_first(path: tuple[slice, ...], number: int) -> tuple[slice, ...]:
    """Return what follows the first `number` tokens of a path."""
    rest = []
    for span in path:
        start = min(span.start + number, span.stop)
        number -= start - span.start
        if start < span.stop:
            rest.append(slice(start, span.stop))
    return tuple(rest)


def _seen(x: Tensor, block: Block) -> Tensor:
    """Return the keys or values that a block sees, in the order of the sequence."""
    if len(block.spans) == 1:
        return x[block.spans[0]]
    return torch.cat([x[span] for span in block.spans])


def _add(total: Tensor, block: Block, part: Tensor) -> None:
    """Add a block's gradient of the keys or values that it sees to the whole gradient."""
    first = 0
    for span in block.spans:
        length = span.stop - span.start
        total[span] += part[first : first + length]
        first += length


@lru_cache(maxsize=64)
def _future(n: int, device: torch.device) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool, device=device).triu(1)


def _hide(scores: Tensor, block: Block, rule: Rule) -> None:
    """Put -inf at the keys that a query must not see. `scores`: `[kv_heads, groups * n, m]`, in place."""
    n, m = block.size
    view = scores.view(scores.shape[0], -1, n, m)
    if rule.causal:
        view[..., m - n :].masked_fill_(_future(n, scores.device), float("-inf"))
    if rule.window:
        # Query i and key j are distance + i - j apart, which must be below the window.
        pairs = torch.ones(n, m, dtype=torch.bool, device=scores.device)
        view.masked_fill_(pairs.tril(block.distance - rule.window), float("-inf"))
        if not rule.causal:
            view.masked_fill_(pairs.triu(block.distance + rule.window), float("-inf"))


def _fold(x: Tensor, kv_heads: int) -> Tensor:
    """Turn `[n, kv_heads * groups, dim]` to `[kv_heads, groups * n, dim]`: query groups become rows."""
    # With 4 heads and 2 heads of keys, heads 0 and 1 see the keys of head 0, and lie below each other.
    n, heads, dim = x.shape
    by_group = x.reshape(n, kv_heads, heads // kv_heads, dim).permute(
        1,
        2,
        0,
        3,
    )
    return by_group.reshape(kv_heads, -1, dim)


def _unfold(x: Tensor, n: int) -> Tensor:
    """Undo `_fold`."""
    kv_heads, rows, dim = x.shape
    return x.view(kv_heads, rows // n, n, dim).permute(2, 0, 1, 3).reshape(n, -1, dim)


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    cu_seqlens: tuple[int, ...],
    rule: Rule,
    parents: tuple[int, ...] = (),
) -> Tensor:
    """Return the attention of each sequence within itself, shared beginnings included (PrefixTree has `parents`).

    `query` `[tokens, heads, dim]`, `key` `[tokens, kv_heads, dim]`, `value` `[tokens, kv_heads, value_dim]`, `sinks`
    `[heads]` or None (one extra logit per head that takes probability and gives nothing, as in gpt-oss).
    The result is `[tokens, heads, value_dim]`.
    """
    return cast(Tensor, _BlockAttention.apply(query, key, value, sinks, cu_seqlens, rule, parents))  # type: ignore[no-untyped-call]


class _BlockAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        cu_seqlens: tuple[int, ...],
        rule: Rule,
        parents: tuple[int, ...],
    ) -> Tensor:
        # A block is n queries of one sequence and the m keys that they may see; all heads run in one product.
        #   S = scale · Q Kᵀ     `[kv_heads, groups · n, m]`: heads that share keys lie as rows below each other
        #   S = cap · tanh(S / cap), if the model asks for it; tanh(S / cap) is kept, as the slope is 1 − its square
        #   S = −inf             at keys that a query must not see: only at the right edge of a block, for causal rules
        #   S = [S, sink]        one column more that takes probability, and gives nothing as it has no value
        #   P = softmax(S)       kept, in the dtype of the inputs; S is not
        #   O = P V              without the sink's column
        # Causal blocks end at their last query's own key, so about half of `[length, length]` is never computed; with a
        # window they also begin late. Sequences never meet, since a block belongs to one. The order of `kept` is the
        # order in which the backward takes things out again: block by block, the bent scores before the probabilities.
        kv_heads = value.shape[1]
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        kept: list[Tensor] = []
        for block in _blocks(cu_seqlens, rule, parents):
            n, m = block.size
            keys = _seen(key, block)
            values = _seen(value, block)
            scores = torch.baddbmm(
                query.new_empty(()),
                _fold(query[block.first : block.end], kv_heads),
                keys.permute(1, 2, 0),
                beta=0,
                alpha=rule.scale,
            )
            if rule.softcap:
                bent = scores.div_(rule.softcap).tanh_()
                scores = bent * rule.softcap
                kept.append(bent)
            _hide(scores, block, rule)
            if sinks is not None:
                column = sinks.to(scores.dtype).view(kv_heads, -1, 1).repeat_interleave(n, 1)
                scores = torch.cat([scores, column], -1)
            probabilities = torch.softmax(scores, -1)
            kept.append(probabilities)
            out[block.first : block.end] = _unfold(
                torch.bmm(probabilities[..., :m], values.transpose(0, 1)), n
            )

        ctx.save_for_backward(query, key, value, *kept)
        ctx.sinks = sinks
        ctx.rule = rule
        ctx.blocks = (cu_seqlens, rule, parents)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # From P and dO only, block by block as in the forward:
        #   dV += Pᵀ dO
        #   dP  = dO Vᵀ           and 0 in the sink's column, whose value is nothing
        #   dS  = P ∘ (dP − Σ dP ∘ P)   over a row: torch's own backward of softmax, which rounds as its forward does
        #   d sink = Σ dS of its column, over the queries; here it is cut off, and what follows is of the m keys
        #   dS  = dS ∘ (1 − tanh²)      where scores were bent
        #   dQ  = scale · dS K,   dK += scale · dSᵀ Q
        # Nothing hides anything again: P is 0 where scores were −inf, so dS is too. A query belongs to one block,
        # so dQ is written; keys and values serve several blocks, several heads (groups are rows, so the product sums
        # over them) and, of a shared beginning, several sequences, so dK and dV are added up, in fp32, in the order of
        # the blocks: the same each time.
        query, key, value, *saved = ctx.saved_tensors
        kept = iter(saved)
        rule = ctx.rule
        sinks = ctx.sinks
        kv_heads = value.shape[1]
        d_query = torch.empty_like(query)
        d_key = zeros_in_fp32(key)
        d_value = zeros_in_fp32(value)
        d_sinks = None if sinks is None else zeros_in_fp32(sinks)
        for block in _blocks(*ctx.blocks):
            n, m = block.size
            bent = next(kept) if rule.softcap else None
            probabilities = next(kept)
            q = _fold(query[block.first : block.end], kv_heads)
            g = _fold(grad[block.first : block.end], kv_heads)
            d_prob = torch.bmm(g, _seen(value, block).permute(1, 2, 0))
            d_scores = _through_softmax(d_prob, probabilities, block, d_sinks)
            if bent is not None:
                d_scores = d_scores * (1 - bent * bent)
            block_d_query = torch.bmm(d_scores, _seen(key, block).transpose(0, 1))
            d_query[block.first : block.end] = _unfold(block_d_query.mul_(rule.scale), n)
            block_d_key = torch.bmm(d_scores.transpose(1, 2), q).mul_(rule.scale)
            _add(d_key, block, block_d_key.transpose(0, 1))
            block_d_value = torch.bmm(probabilities[..., :m].transpose(1, 2), g)
            _add(d_value, block, block_d_value.transpose(0, 1))

        if d_sinks is not None:
            d_sinks = d_sinks.to(sinks.dtype)
        return d_query, d_key.to(key.dtype), d_value.to(value.dtype), d_sinks, None, None, None


def zeros_in_fp32(x: Tensor) -> Tensor:
    """Return zeros in the shape of a tensor: a sum that is not rounded to the dtype of the tensor."""
    return torch.zeros(x.shape, dtype=torch.float32, device=x.device)


def _through_softmax(
    d_prob: Tensor,
    probabilities: Tensor,
    block: Block,
    d_sinks: Tensor | None,
) -> Tensor:
    """Return the gradient of a block's scores, and add its part to that of the sinks."""
    n, m = block.size
    if d_sinks is not None:
        d_prob = F.pad(d_prob, (0, 1))
    if SOFTMAX_BACKWARD is not None:
        d_scores = SOFTMAX_BACKWARD(d_prob, probabilities, -1, probabilities.dtype)
    else:
        weighted = d_prob * probabilities
        d_scores = weighted - probabilities * weighted.sum(-1, keepdim=True)
    if d_sinks is not None:
        d_sinks += d_scores[..., m].float().view(d_sinks.numel(), n).sum(1)
    return cast(Tensor, d_scores[..., :m])
