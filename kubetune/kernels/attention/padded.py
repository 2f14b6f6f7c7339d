"""Exact attention over a packed batch of many short sequences, padded for the length of the attention only.

Short sequences lie behind each other in rows of one length, each hidden from the others; longer ones have rows of
their own, those of like length in one batch. So a few batched products do the work of many small ones, and little is
padding. It knows dropout of probabilities, which other kernels for packed batches do not.
Memory is O(length²) on a CPU.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kubetune.kernels.attention.blockwise import Rule
from kubetune.kernels.dropout import dropout
from kubetune.planning.activations import few_values

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Places = NDArray[np.int64]

SHORTEST = 16  # the least length of rows
SAME_LENGTH = 64  # sequences up to here share rows: batches of their own would cost more in calls than these in pairs


class Group(NamedTuple):
    """Rows `[size, length]` of sequences. `hidden` `[size, 1, 1 or length, length]` is added to scores: minus infinity
    at keys that a query must not see; None where it sees all."""

    size: int
    length: int
    hidden: Tensor | None


class Layout(NamedTuple):
    """The groups of a packed batch, laid end to end, each head of a row by itself: `source` are places of all among the
    heads of the packed batch's tokens, `place` `[tokens × heads]` is where each of these stands."""

    groups: tuple[Group, ...]
    source: Tensor
    place: Tensor


class _Padded(torch.autograd.Function):
    """Rows of a packed batch at the places of the groups. Copies in padding get no gradient, as they count nowhere:
    keys and values there are hidden, and what queries there find is not taken."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.shape = x.shape
        return x.reshape(-1, x.shape[-1]).index_select(0, source)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return gradients[0].index_select(0, place).view(ctx.shape), None, None


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
def _layout(cu_seqlens: tuple[int, ...], heads: int, device: torch.device, dtype: torch.dtype) -> Layout:
    """Made once per packed batch, not once per layer."""
    by_class: dict[int, list[tuple[int, int]]] = {}
    for start, stop in pairwise(cu_seqlens):
        by_class.setdefault(max(SAME_LENGTH - 1, stop - start - 1).bit_length(), []).append((start, stop))
    first, groups, sources = 0, [], []
    each, place = np.arange(heads), np.empty((cu_seqlens[-1], heads), np.int64)
    for _, spans in sorted(by_class.items()):
        size, length, real, found = _rows(spans, device)
        source, owner = np.zeros(size * length, np.int64), np.full(size * length, -1, np.int32)
        source[found], owner[found] = real, np.repeat(np.arange(len(spans)), [stop - start for start, stop in spans])
        hidden = _hidden(owner.reshape(size, 1, length), dtype, is_shared=spans[0][1] - spans[0][0] <= SAME_LENGTH)
        groups.append(Group(size, length, None if hidden is None else hidden.to(device)))
        sources.append((source.reshape(size, 1, length) * heads + each[:, None]).ravel())
        place[real] = first + (found // length * heads * length + found % length)[:, None] + each * length
        first += len(sources[-1])
    laid = (torch.from_numpy(numbers).to(device) for numbers in (np.concatenate(sources), place.ravel()))
    return Layout(tuple(groups), *laid)


def _rows(spans: list[tuple[int, int]], device: torch.device) -> tuple[int, int, Places, Places]:
    """Number and length of the rows for spans of a packed batch, which it sorts; the spans' places there and in the
    rows `[tokens]`. Of short ones as many share a row as it has room for."""
    spans.sort(key=lambda span: span[0] - span[1])
    lengths = [stop - start for start, stop in spans]
    longest = length = lengths[0]
    if device.type == "cpu":  # oneDNN compiles each product of new sizes, which takes longer than a small one itself
        length = few_values(longest)
    if longest <= SAME_LENGTH:
        length = max(SHORTEST, 1 << (longest - 1).bit_length())
    size, firsts = 0, []
    roomy: list[list[int]] = [[] for _ in range(length + 1)]  # rows by the room that is left in them
    for needed in lengths:
        shared = range(needed, length + 1) if longest <= SAME_LENGTH else ()
        room = next((room for room in shared if roomy[room]), 0)
        row = roomy[room].pop() if room else size
        size, room = max(size, row + 1), room or length
        roomy[room - needed].append(row)
        firsts.append((row + 1) * length - room)
    ends = np.cumsum(lengths)
    starts = np.array([[start for start, _ in spans], firsts]) - (ends - lengths)
    real, place = np.repeat(starts, lengths, 1) + np.arange(ends[-1])
    return few_values(size) if device.type == "cpu" else size, length, real, place


def _hidden(owner: NDArray[np.int32], dtype: torch.dtype, *, is_shared: bool) -> Tensor | None:
    """Keys that a query must not see, given whose each place is, -1 for padding. Which sees padding, or all of its row:
    the softmax of no key at all would be no number."""
    if is_shared:
        hidden = owner[:, :, :, None] != owner[:, :, None]
    else:
        hidden = (owner < 0)[:, :, None] & (owner[:, :, :1] >= 0)[:, :, None]
    if not hidden.any():
        return None
    # To add these takes a tenth of the time of filling by a mask.
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), -math.inf)


def padded_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple[int, ...], rule: Rule) -> Tensor:
    """Attention of each sequence within itself: q `[tokens, heads, dim]`, k and v `[tokens, kv_heads, dim]`.

    Returns `[tokens, heads, dim]`. Windows and soft caps are not for this function.
    """
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    heads = q.shape[1]
    groups, source, place = _layout(cu_seqlens, heads, q.device, q.dtype)
    sizes = [group.size * heads * group.length for group in groups]
    padded = [_Padded.apply(x, source, place).split(sizes) for x in (q, k, v)]  # type: ignore[no-untyped-call]
    rows = []
    for group, *parts in zip(groups, *padded, strict=True):
        # What stands in padding is finite, and counts nowhere.
        mine = (x.view(group.size, heads, group.length, -1) for x in parts)
        rows.append(_attend(group, rule, *mine).reshape(-1, v.shape[-1]))
    whole = rows[0] if len(rows) == 1 else torch.cat(rows)
    return cast(Tensor, _Packed.apply(whole, place)).view(-1, heads, v.shape[-1])  # type: ignore[no-untyped-call]


def _attend(group: Group, rule: Rule, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = group.hidden
    if rule.causal:
        future = torch.full((group.length, group.length), -math.inf, dtype=q.dtype, device=q.device).triu(1)
        hidden = future if hidden is None else hidden + future
    if q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, hidden, rule.dropout, scale=rule.scale)
    # On a CPU plain products are faster than SDPA for short sequences, and SDPA's own fallback with dropout.
    scores = torch.matmul(q, k.transpose(-1, -2) * rule.scale)
    if hidden is not None:
        scores = scores.add_(hidden)
    return torch.matmul(dropout(torch.softmax(scores, -1), rule.dropout), v)
