"""Exact attention over a packed batch of many short sequences, which is padded only while attention is computed.

Short sequences lie after each other in rows of one length, each hidden from the others; longer ones have rows of
their own, with similar lengths in one batch. So a few batched products do the work of many small ones, and little
is padding. It knows dropout of probabilities, which other kernels for packed batches do not. Memory is O(length²)
on a CPU.

Example, as if rows of short sequences had 4 places:

    packed batch       a a a b c c d d d d d        cu_seqlens 0 3 4 6 11
    group 0, 2 rows    a a a b                      a and b do not see each other, c does not see padding
                       c c . .
    group 1, 1 row     d d d d d
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

from kubetune.kernels import product_sizes
from kubetune.kernels.attention.blockwise import Rule

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Places = NDArray[np.int64]

Span = tuple[int, int]

# The least length of rows.
SHORTEST = 16
# Sequences up to this length share rows. In batches of their own the calls would cost more than the pairs that are saved.
SAME_LENGTH = 64


class LengthGroup(NamedTuple):
    """Rows `[size, length]` of sequences."""

    size: int  # rows
    length: int  # places in each row
    # Added to scores, [size, 1, 1 or length, length]: minus infinity at keys that a query must not see; None: it sees all.
    hidden: Tensor | None


class Layout(NamedTuple):
    """The groups of a packed batch, laid end to end, `[group][row][head][place]`."""

    groups: tuple[LengthGroup, ...]
    source: Tensor  # int64 [places of all groups] index into the batch's `[tokens × heads]`; 0 in padding
    # int64 [tokens × heads] where each of these is among the places of all groups
    place: Tensor


class Filling(NamedTuple):
    """Where the sequences of one group are."""

    size: int  # rows
    length: int  # places in each row
    tokens: Places  # [tokens of the group] index into the packed batch
    places: Places  # [tokens of the group] row × length + place in the row


class _Padded(torch.autograd.Function):
    """Put the rows of a packed batch at the places of the groups.

    Copies in padding get no gradient, as they count nowhere: keys and values there are hidden, and the outputs of
    queries there are not taken.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        source: Tensor,
        place: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(place)
        ctx.shape = x.shape
        return x.reshape(-1, x.shape[-1]).index_select(0, source)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return gradients[0].index_select(0, place).view(ctx.shape), None, None


class _Packed(torch.autograd.Function):
    """Take the rows of a packed batch from the places of the groups, without the padding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.rows = len(x)
        return x.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (place,) = ctx.saved_tensors
        (gradient,) = gradients
        padded = gradient.new_zeros(ctx.rows, *gradient.shape[1:])
        return padded.index_copy_(0, place, gradient), None


@lru_cache(maxsize=8)
def _layout(
    cu_seqlens: tuple[int, ...],
    heads: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Layout:
    """Return the layout of a packed batch, made once for all layers."""
    classes: dict[int, list[Span]] = {}
    for start, stop in pairwise(cu_seqlens):
        # Sequences up to SAME_LENGTH are one class; of longer ones each power of two is one.
        number = max(SAME_LENGTH - 1, stop - start - 1).bit_length()
        classes.setdefault(number, []).append((start, stop))

    groups: list[LengthGroup] = []
    sources: list[Places] = []
    place = np.empty((cu_seqlens[-1], heads), np.int64)
    first = 0  # where the group begins among the places of all groups
    for _, spans in sorted(classes.items()):
        spans.sort(key=lambda span: span[0] - span[1])  # the longest first
        filling = _fill_rows(spans, device)
        hidden = _hidden(spans, filling, dtype)
        moved = None if hidden is None else hidden.to(device)
        groups.append(LengthGroup(filling.size, filling.length, moved))
        sources.append(_source(filling, heads))
        place[filling.tokens] = first + _places_of_heads(filling, heads)
        first += len(sources[-1])

    source = torch.from_numpy(np.concatenate(sources))
    return Layout(tuple(groups), source.to(device), torch.from_numpy(place.ravel()).to(device))


def _fill_rows(spans: list[Span], device: torch.device) -> Filling:
    """Put sequences into rows, the longest first. A row holds as many short ones as it has room for."""
    # Lengths 9, 9, 7, 5, 2 in rows of 16 places; each goes where the least room is left that is enough:
    #
    #     row 0    9 of the first, 5 of the fourth, 2 of the last
    #     row 1    9 of the second, 7 of the third
    lengths = [stop - start for start, stop in spans]
    is_shared = _share_rows(spans)
    length = lengths[0]
    if is_shared:
        length = max(SHORTEST, 1 << (length - 1).bit_length())
    elif device.type == "cpu":
        length = product_sizes.few_values(length)

    rows_by_room: list[list[int]] = [[] for _ in range(length + 1)]
    size = 0
    firsts = []  # the first place of each sequence
    for needed in lengths:
        row, room = size, length  # a new row, unless one has room: that with the least of it
        if is_shared:
            for left in range(needed, length + 1):
                if rows_by_room[left]:
                    row, room = rows_by_room[left].pop(), left
                    break
        size = max(size, row + 1)
        rows_by_room[room - needed].append(row)
        firsts.append((row + 1) * length - room)

    before = np.cumsum(lengths) - lengths  # tokens of the sequences before each
    within = np.arange(sum(lengths)) - np.repeat(before, lengths)  # of a token in its sequence
    starts = [start for start, _ in spans]
    return Filling(
        size=product_sizes.few_values(size) if device.type == "cpu" else size,
        length=length,
        tokens=np.repeat(starts, lengths) + within,
        places=np.repeat(firsts, lengths) + within,
    )


def _share_rows(spans: list[Span]) -> bool:
    """True if sequences are so short that several share a row. `spans` begin with the longest."""
    start, stop = spans[0]
    return stop - start <= SAME_LENGTH


def _source(filling: Filling, heads: int) -> Places:
    """Return for each place, `[row][head][place]`, which token and head of the batch is there."""
    tokens = np.zeros(filling.size * filling.length, np.int64)
    tokens[filling.places] = filling.tokens
    by_row = tokens.reshape(filling.size, 1, filling.length)
    return cast("Places", (by_row * heads + np.arange(heads)[:, None]).ravel())


def _places_of_heads(filling: Filling, heads: int) -> Places:
    """Return where each head of each token is, `[tokens, heads]`: rows × heads × length."""
    row, place = np.divmod(filling.places, filling.length)
    first_head = row * heads * filling.length + place
    return cast("Places", first_head[:, None] + np.arange(heads) * filling.length)


def _hidden(
    spans: list[Span],
    filling: Filling,
    dtype: torch.dtype,
) -> Tensor | None:
    """Return what hides the keys that a query must not see; None if no key is hidden.

    Queries in padding see padding, or all of their row: the softmax of no key at all would be no number.
    """
    lengths = [stop - start for start, stop in spans]
    owners = np.full(filling.size * filling.length, -1, np.int32)  # the sequence; -1 in padding
    owners[filling.places] = np.repeat(np.arange(len(spans)), lengths)
    owner = owners.reshape(filling.size, 1, filling.length)
    if _share_rows(spans):
        hidden = owner[:, :, :, None] != owner[:, :, None]
    else:
        hidden = (owner < 0)[:, :, None] & (owner[:, :, :1] >= 0)[:, :, None]
    if not hidden.any():
        return None
    # To add these takes a tenth of the time of filling by a mask.
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), -math.inf)


def padded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: tuple[int, ...],
    rule: Rule,
) -> Tensor:
    """Return the attention of each sequence within itself, `[tokens, heads, dim]`.

    q is `[tokens, heads, dim]`, k and v `[tokens, kv_heads, dim]`. Windows and soft caps are not for this function.
    """
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k = k.repeat_interleave(repeats, 1)
        v = v.repeat_interleave(repeats, 1)
    heads = q.shape[1]
    groups, source, place = _layout(cu_seqlens, heads, q.device, q.dtype)
    sizes = [group.size * heads * group.length for group in groups]
    # Padding holds copies of some token: finite numbers that count nowhere.
    group_q = _Padded.apply(q, source, place).split(sizes)  # type: ignore[no-untyped-call]
    group_k = _Padded.apply(k, source, place).split(sizes)  # type: ignore[no-untyped-call]
    group_v = _Padded.apply(v, source, place).split(sizes)  # type: ignore[no-untyped-call]
    outputs = []
    for number, group in enumerate(groups):
        shape = (group.size, heads, group.length, -1)
        output = _attend(
            group,
            rule,
            group_q[number].view(shape),
            group_k[number].view(shape),
            group_v[number].view(shape),
        )
        outputs.append(output.reshape(-1, v.shape[-1]))

    whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return cast(Tensor, _Packed.apply(whole, place)).view(-1, heads, v.shape[-1])  # type: ignore[no-untyped-call]


def _attend(
    group: LengthGroup,
    rule: Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    hidden = group.hidden
    if rule.causal:
        future = torch.full(
            (group.length, group.length),
            -math.inf,
            dtype=q.dtype,
            device=q.device,
        ).triu(1)
        hidden = future if hidden is None else hidden + future

    if q.is_cuda:
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            hidden,
            rule.dropout,
            scale=rule.scale,
        )

    # On a CPU plain products are faster than SDPA for short sequences, and SDPA's own fallback with dropout.
    scores = torch.matmul(q, k.transpose(-1, -2) * rule.scale)
    if hidden is not None:
        scores = scores.add_(hidden)
    return torch.matmul(F.dropout(torch.softmax(scores, -1), rule.dropout), v)
