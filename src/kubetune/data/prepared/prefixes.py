"""Find rows that begin with the same tokens, so that this prefix is computed once (prefix sharing).

Conversations with one system prompt share it, and so do the two answers of a pair their question. In a packed batch the
prefix is a sequence of its own, and what each row has beyond it goes on from there. This file finds the prefixes and
cuts a step's rows into micro-batches in which like rows are together. batching/shared_beginnings.py makes the tensors,
models/prefix_sharing.py proves that the model computes the same, prefix_rules.py says when it is worth it.

Example, in which a letter is 16 tokens, one GRAIN. A step has the rows

    0: A B x      1: A B y y      2: A z      3: q

`sort_by_prefix` puts like rows together, and says how much each has in common with the row before it:

    row      0      1        2     3
             A B x  A B y y  A z   q
    shared   0      2        1     0

`prefix_tree` makes sequences of them, one for each prefix and one for the rest of each row:

    segment  0: A     1: B    2: y y   3: x   4: z   5: q
    parent   none     0       1        1      0      none
    rows     0 1 2    0 1     1        0      2      3

So the model computes 7 letters in place of 10: the lengths of the rows less what they share.

`split_by_prefix` cuts the sorted rows where a rank or a micro-batch is full. A cut costs the prefix once more: with a
budget of 5 letters, `A B x, A B y y` go into one micro-batch (5 letters), `A z` and `q` into another (3 letters).

These are pure functions of ids, as those of order.py are of lengths. Which rows make up a step is order.py's alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kubetune.data.order import Ids
from kubetune.data.prepared.micro_batches import balance_ranks, pack
from kubetune.data.prepared.prefix_rules import GRAIN

Tokens = NDArray[np.uint32]


class Segment(NamedTuple):
    """Tokens `[start, end)` that all of `rows` have, after those of the segment `parent`."""

    # index of a segment, -1 for tokens that rows begin with
    parent: int
    start: int
    end: int
    rows: Ids


def sort_by_prefix(sequences: Sequence[Tokens]) -> tuple[Ids, Ids]:
    """Return the order that puts like prefixes together, and how many tokens each then shares with the one before.

    These are whole grains, and never all of a sequence: its last token is always its own.
    """
    # Big-endian bytes sort as the ids do, and sorting bytes is fast.
    keys = [ids.astype(">u4").tobytes() for ids in sequences]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    shared = np.zeros(len(order), np.int64)
    grain_of_bytes = 4 * GRAIN
    for place, (before, after) in enumerate(pairwise(order), 1):
        if keys[before][:grain_of_bytes] == keys[after][:grain_of_bytes]:
            shared[place] = _common(sequences[before], sequences[after])
    return np.array(order, np.int64), shared


def _common(first: Tokens, second: Tokens) -> int:
    """Return how many tokens, in whole grains, two sequences begin with in common."""
    # Without the last token of either: each row needs a token of its own that predicts.
    common = max(0, min(len(first), len(second)) - 1)
    differing = np.flatnonzero(first[:common] != second[:common])
    if len(differing):
        common = int(differing[0])
    return common // GRAIN * GRAIN


def prefix_tree(sequences: Sequence[Tokens]) -> list[Segment]:
    """Return the segments of the sequences: each parent before its children, all that goes on from one right after it.

    The longest sequence of each subtree comes first, so that it lies in the order of its tokens. Every sequence ends in
    a segment of its own.
    """
    order, shared = sort_by_prefix(sequences)
    lengths = np.array([len(ids) for ids in sequences], np.int64)[order]
    segments: list[Segment] = []
    # Rows [first, end) of the order, how many of their tokens are in segments yet, and the last of these segments.
    waiting = [(0, len(order), 0, -1)]
    while waiting:
        first, end, laid, parent = waiting.pop()
        if first + 1 == end:
            segments.append(Segment(parent, laid, int(lengths[first]), order[first:end]))
            continue

        # What all of these rows have in common is a segment of its own.
        common = int(shared[first + 1 : end].min())
        if common > laid:
            segments.append(Segment(parent, laid, common, order[first:end]))
            laid = common
            parent = len(segments) - 1
        # The rows part where two neighbours share no more than that.
        borders = first + 1 + np.flatnonzero(shared[first + 1 : end] <= laid)
        parts = list(pairwise([first, *borders.tolist(), end]))
        parts.sort(key=lambda part: int(lengths[slice(*part)].max()))
        for part in parts:  # the last one, the longest, is taken next
            waiting.append((*part, laid, parent))

    return segments


class _Stretch(NamedTuple):
    """Sorted rows `[first, end)`, and the tokens that they take in one batch."""

    first: int
    end: int
    tokens: int


class _SortedRows(NamedTuple):
    """Rows that share prefixes, like ones together, `[rows]` each."""

    # of each row, its index in the step
    places: Ids
    lengths: Ids
    # tokens in common with the row before it
    shared: Ids

    def cut(self, first: int, end: int, most: int) -> list[_Stretch]:
        """Cut the rows `[first, end)` into stretches that take at most `most` tokens each, or are one row."""
        stretches = []
        begin = first
        tokens = 0
        for row in range(first, end):
            more = int(self.lengths[row])
            if row > begin:
                more -= int(self.shared[row])
                if tokens + more > most:
                    stretches.append(_Stretch(begin, row, tokens))
                    begin = row
                    tokens = 0
                    more = int(self.lengths[row])

            tokens += more

        if begin < end:
            stretches.append(_Stretch(begin, end, tokens))
        return stretches

    def cut_evenly(self, number: int, least: int) -> list[_Stretch]:
        """Cut all rows into at most `number` stretches, the largest of which is as small as possible.

        `least`: the tokens of an even share; a limit below it cannot be enough.
        """
        rows = len(self.places)
        sizes = range(least, int(self.lengths.sum()) + 1)

        def is_enough(most: int) -> bool:
            return len(self.cut(0, rows, most)) <= number

        # The higher the limit, the fewer stretches: a binary search finds the lowest limit that is enough.
        return self.cut(0, rows, least + bisect_left(sizes, True, key=is_enough))


class _Group(NamedTuple):
    """Rows that stay in one micro-batch, by their ids, and the tokens that they take in it."""

    rows: Ids
    tokens: int


def split_by_prefix(
    ids: Ids,
    sequences: Callable[[int], Sequence[Tokens]],
    world_size: int,
    token_budget: int,
) -> tuple[list[list[Ids]], int]:
    """Return the micro-batches of every rank as `micro_batches.split_batch` does, and the tokens that all compute.

    `sequences` returns those of a row, of which the first is compared with other rows'. Rows that share nothing fill
    what the others leave.
    """
    rows = [sequences(int(i)) for i in ids]
    lengths = np.array([_computed_tokens(row) for row in rows], np.int64)
    family = _rows_that_share([row[0] for row in rows], lengths)
    single = np.delete(np.arange(len(ids)), family.places)
    total = int(lengths.sum() - family.shared.sum())
    even_share = -(-total // world_size)  # rounded up

    # As many stretches as ranks: cutting more often would compute more prefixes again.
    stretches = family.cut_evenly(world_size, even_share)

    # What ranks get is a unit: the stretches come first, then the single rows.
    stretch_tokens = [stretch.tokens for stretch in stretches]
    units = np.array([*stretch_tokens, *lengths[single]], np.int64)
    ranks = []
    computed = 0  # tokens, of all ranks
    for of_rank in balance_ranks(np.arange(len(units)), units, world_size):
        groups = []
        # Numbers below `len(stretches)` are stretches, others single rows.
        is_stretch = of_rank < len(stretches)
        for unit in of_rank[is_stretch]:
            stretch = stretches[unit]
            for piece in family.cut(stretch.first, stretch.end, token_budget):
                places = family.places[piece.first : piece.end]
                groups.append(_Group(ids[places], piece.tokens))
        for place in single[of_rank[~is_stretch] - len(stretches)]:
            groups.append(_Group(ids[place : place + 1], int(lengths[place])))

        ranks.append(_packed(groups, token_budget))
        computed += sum(group.tokens for group in groups)

    return ranks, computed


def _computed_tokens(sequences: Sequence[Tokens]) -> int:
    """Return the tokens that a row takes alone: of its sequences, what they share counts once."""
    _, shared = sort_by_prefix(sequences)
    return sum(map(len, sequences)) - int(shared.sum())


def _rows_that_share(sequences: Sequence[Tokens], lengths: Ids) -> _SortedRows:
    """Return the rows that share a prefix with the row before or after them, of the first sequences of all rows."""
    order, shared = sort_by_prefix(sequences)
    is_shared = (shared > 0) | np.append(shared[1:] > 0, False)
    return _SortedRows(order[is_shared], lengths[order[is_shared]], shared[is_shared])


def _packed(groups: Sequence[_Group], token_budget: int) -> list[Ids]:
    """Pack groups of rows into micro-batches."""
    tokens = np.array([group.tokens for group in groups], np.int64)
    micro_batches = []
    for numbers in pack(np.arange(len(groups)), tokens, token_budget):
        # A group stays whole, or its rows would lose what they share.
        rows = [groups[number].rows for number in numbers]
        micro_batches.append(np.concatenate(rows))
    return micro_batches
