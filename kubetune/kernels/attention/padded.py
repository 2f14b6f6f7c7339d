"""Exact attention over a packed batch of many short sequences, padded for the length of the attention only.

Sequences of like length share a batch, so that little more than half of it is padding, but for the shortest; one
batched product does the work of many small ones. It knows dropout of probabilities, which other kernels for
packed batches do not.
Memory is O(length²) on a CPU.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

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


@lru_cache(maxsize=8)
def _groups(cu_seqlens: tuple[int, ...], device: torch.device) -> tuple[Group, ...]:
    """Made once per packed batch, not once per layer."""
    by_class: dict[int, list[tuple[int, int]]] = {}
    for start, stop in pairwise(cu_seqlens):
        by_class.setdefault(max(SHORTEST - 1, stop - start - 1).bit_length(), []).append((start, stop))
    return tuple(_group(spans, device) for _, spans in sorted(by_class.items()))


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
    out = v.new_empty(q.shape[0], q.shape[1], v.shape[2])
    for group in _groups(cu_seqlens, q.device):
        attended = _attend(_pad(q, group), _pad(k, group), _pad(v, group), group, rule)
        rows = attended.transpose(1, 2).reshape(group.size * group.length, *out.shape[1:])
        out = out.index_copy(0, group.real, rows.index_select(0, group.place))
    return out


def _pad(x: Tensor, group: Group) -> Tensor:
    """`[tokens, heads, dim]` -> `[size, heads, length, dim]`. What stands in padding is finite, and counts nowhere."""
    return x.index_select(0, group.source).view(group.size, group.length, *x.shape[1:]).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, group: Group, rule: Rule) -> Tensor:
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
