"""Exact attention over a packed batch of many short sequences, padded for the length of the attention only.

Sequences of like length share a batch, so that little more than half of it is padding, but for the shortest; one
batched product does the work of many small ones. It knows dropout of probabilities, which other kernels for
packed batches do not.
Memory is O(length²) on a CPU.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from kubetune.kernels.attention.blockwise import Rule
from kubetune.kernels.dropout import dropout
from kubetune.planning.activations import few_values

SHORTEST = 16  # sequences up to here share one batch: smaller ones would cost more in calls than in padding
SAME_LENGTH = 64  # up to here, all batches of a class are of one length on a CPU


class Group(NamedTuple):
    """Sequences of like length. `source` `[size × length]`: places in the packed batch, any where there is padding;
    `real` `[tokens]` and `place` `[tokens]`: places of what is no padding, in the packed batch and in the padded one;
    `hidden` `[size, 1, 1, length]`: which keys are padding, or None when none are."""

    size: int
    length: int
    source: Tensor
    real: Tensor
    place: Tensor
    hidden: Tensor | None


class Layout(NamedTuple):
    """The groups of a packed batch, laid end to end: `source` are those of all, `place` `[tokens]` is where among them
    each token of the packed batch stands."""

    groups: tuple[Group, ...]
    source: Tensor
    place: Tensor


class _Padded(torch.autograd.Function):
    """Rows of a packed batch at the places of the groups. Copies in padding get no gradient, as they count nowhere:
    keys and values there are hidden, and what queries there find is not taken."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return gradients[0].index_select(0, place), None, None


class _Packed(torch.autograd.Function):
    """The way back: rows at the places of the groups, without the padding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.rows = len(x)
        return x.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (place,), gradient = ctx.saved_tensors, gradients[0]
        return gradient.new_zeros(ctx.rows, *gradient.shape[1:]).index_copy_(0, place, gradient), None


@lru_cache(maxsize=8)
def _layout(cu_seqlens: tuple[int, ...], device: torch.device) -> Layout:
    """Made once per packed batch, not once per layer."""
    by_class: dict[int, list[tuple[int, int]]] = {}
    for start, stop in pairwise(cu_seqlens):
        by_class.setdefault(max(SHORTEST - 1, stop - start - 1).bit_length(), []).append((start, stop))
    groups = tuple(_group(spans, device) for _, spans in sorted(by_class.items()))
    first, place = 0, torch.empty(cu_seqlens[-1], dtype=torch.long, device=device)
    for group in groups:
        place[group.real] = first + group.place
        first += group.size * group.length
    return Layout(groups, torch.cat([group.source for group in groups]), place)


def _group(spans: list[tuple[int, int]], device: torch.device) -> Group:
    lengths = torch.tensor([stop - start for start, stop in spans])
    size, length = len(spans), int(lengths.max())
    if device.type == "cpu":  # oneDNN compiles each product of new sizes, which takes longer than a small one itself
        size = few_values(size)
        length = max(SHORTEST, 1 << (length - 1).bit_length()) if length <= SAME_LENGTH else few_values(length)
    real = torch.zeros(size, length, dtype=torch.bool)
    real[: len(spans)] = torch.arange(length)[None] < lengths[:, None]
    sources = torch.zeros(size, length, dtype=torch.long)
    sources[: len(spans)] = torch.tensor([start for start, _ in spans])[:, None] + torch.arange(length)[None]
    sources.masked_fill_(~real, 0)
    hidden = None
    if not bool(real.all()):
        hidden = ~real[:, None, None]
        hidden[len(spans) :] = False  # nothing but padding: the softmax of no key at all would be no number
    source, filled, place = (t.to(device) for t in (sources.flatten(), sources[real], real.flatten().nonzero()[:, 0]))
    return Group(size, length, source, filled, place, None if hidden is None else hidden.to(device))


def padded_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple[int, ...], rule: Rule) -> Tensor:
    """Attention of each sequence within itself: q `[tokens, heads, dim]`, k and v `[tokens, kv_heads, dim]`.

    Returns `[tokens, heads, dim]`. Windows and soft caps are not for this function.
    """
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    groups, source, place = _layout(cu_seqlens, q.device)
    sizes = [group.size * group.length for group in groups]
    padded = [_Padded.apply(x, source, place).split(sizes) for x in (q, k, v)]  # type: ignore[no-untyped-call]
    rows = []
    for group, *parts in zip(groups, *padded, strict=True):
        # `[size, heads, length, dim]`. What stands in padding is finite, and counts nowhere.
        mine = (x.view(group.size, group.length, *x.shape[1:]).transpose(1, 2) for x in parts)
        attended = _attend(group, rule, *mine)
        rows.append(attended.transpose(1, 2).reshape(-1, q.shape[1], v.shape[2]))
    return cast(Tensor, _Packed.apply(torch.cat(rows), place))  # type: ignore[no-untyped-call]


def _attend(group: Group, rule: Rule, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = group.hidden
    if rule.causal:
        future = torch.ones(group.length, group.length, dtype=torch.bool, device=q.device).triu(1)
        hidden = future if hidden is None else hidden | future
    if q.is_cuda:
        seen = None if hidden is None else ~hidden
        return F.scaled_dot_product_attention(q, k, v, seen, rule.dropout, scale=rule.scale)
    # On a CPU plain products are faster than SDPA for short sequences, and SDPA's own fallback with dropout.
    scores = torch.matmul(q, k.transpose(-1, -2) * rule.scale)
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.matmul(dropout(torch.softmax(scores, -1), rule.dropout), v)
