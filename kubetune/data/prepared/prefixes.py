"""Beginnings that rows share, so that a packed batch computes them once: found, laid out as a tree, kept together.

Pure functions of ids, as order.py's are of lengths. Which rows make up a step is order.py's alone; here a step's rows
are only cut into micro-batches another way. Shared is what is shared in whole grains: a few words that conversations
happen to begin with are not worth a sequence of their own, and what a set of rows takes is then the sum of what each
has beyond the one before it, in sorted order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kubetune.data.prepared.order import Ids
from kubetune.data.prepared.shares import balance_ranks, pack
from kubetune.data.prepared.spared import GRAIN

Tokens = NDArray[np.uint32]


class Segment(NamedTuple):
    """Tokens `[start, end)` that all of `rows` have, behind those of the segment `parent` (-1: at their beginning)."""

    parent: int
    start: int
    end: int
    rows: Ids


def beginnings(sequences: Sequence[Tokens]) -> tuple[Ids, Ids]:
    """The order that puts like beginnings together, and how many tokens each then shares with the one before it.

    Whole grains, and never all of a sequence: the last token of each is its own.
    """
    keys = [ids.astype(">u4").tobytes() for ids in sequences]  # bytes sort as their ids do
    order = sorted(range(len(keys)), key=keys.__getitem__)
    shared = np.zeros(len(order), np.int64)
    for place, (before, after) in enumerate(pairwise(order), 1):
        if keys[before][: 4 * GRAIN] == keys[after][: 4 * GRAIN]:
            shared[place] = _common(sequences[before], sequences[after])
    return np.array(order, np.int64), shared


def _common(first: Tokens, second: Tokens) -> int:
    most = max(0, min(len(first), len(second)) - 1)
    differing = np.flatnonzero(first[:most] != second[:most])
    return int(differing[0] if len(differing) else most) // GRAIN * GRAIN


def tree(sequences: Sequence[Tokens]) -> list[Segment]:
    """Sequences as a tree: each parent before its children, all that goes on from a segment right behind it.

    The longest sequence of each subtree comes first, so that it lies in the order of its tokens. Every sequence ends in
    a segment of its own.
    """
    order, shared = beginnings(sequences)
    lengths = np.array([len(ids) for ids in sequences], np.int64)[order]
    found: list[Segment] = []
    waiting = [
        (0, len(order), 0, -1)
    ]  # rows [first, end) of the order, their tokens laid so far, and by which segment
    while waiting:
        first, end, done, parent = waiting.pop()
        if first + 1 == end:
            found.append(Segment(parent, done, int(lengths[first]), order[first:end]))
            continue
        common = int(shared[first + 1 : end].min())
        if common > done:
            found.append(Segment(parent, done, common, order[first:end]))
            done, parent = common, len(found) - 1
        cuts = [first, *(first + 1 + np.flatnonzero(shared[first + 1 : end] <= done)).tolist(), end]
        parts = sorted(pairwise(cuts), key=lambda part: int(lengths[slice(*part)].max()))
        waiting += [(*part, done, parent) for part in parts]  # the longest is taken next
    return found


class _Line(NamedTuple):
    """Rows that share, like ones together: their places and lengths, and what each shares with the one before it."""

    places: Ids
    lengths: Ids
    shared: Ids

    def cut(self, first: int, end: int, most: int) -> list[tuple[int, int, int]]:
        """Stretches of the rows `[first, end)` that take at most `most` tokens, or are one row; with these tokens."""
        found, begun, used = [], first, 0
        for place in range(first, end):
            more = int(self.lengths[place] - (self.shared[place] if place > begun else 0))
            if place > begun and used + more > most:
                found.append((begun, place, used))
                begun, used, more = place, 0, int(self.lengths[place])
            used += more
        return [*found, (begun, end, used)] if begun < end else found

    def parts(self, number: int, least: int) -> list[tuple[int, int, int]]:
        """At most `number` stretches of at least about `least` tokens, the largest as small as can be."""
        caps = range(least, int(self.lengths.sum()) + 1)
        place = bisect_left(
            caps, True, key=lambda most: len(self.cut(0, len(self.places), most)) <= number
        )
        return self.cut(0, len(self.places), least + place)


def split_shared(
    ids: Ids, sequences: Callable[[int], Sequence[Tokens]], world_size: int, token_budget: int
) -> tuple[list[list[Ids]], int]:
    """Micro-batches of every rank as `shares.split_batch` has them, like beginnings together; and the tokens of all.

    `sequences` are those of a row, of which the first is compared with other rows'. Rows that share stand in a line,
    which is cut where a rank or a micro-batch is full: each cut costs the beginning once more. Rows that share nothing
    fill what is left.
    """
    found = [sequences(int(i)) for i in ids]
    lengths = np.array(
        [sum(map(len, own)) - int(beginnings(own)[1].sum()) for own in found], np.int64
    )
    order, shared = beginnings([own[0] for own in found])
    sharing = (shared > 0) | np.append(shared[1:] > 0, False)
    line = _Line(order[sharing], lengths[order[sharing]], shared[sharing])
    alone = np.delete(np.arange(len(ids)), order[sharing])
    whole = int(line.lengths.sum() - line.shared.sum() + lengths[alone].sum())
    parts = line.parts(world_size, -(-whole // world_size))
    sizes = np.array([*(tokens for *_, tokens in parts), *lengths[alone]], np.int64)
    shares, computed = [], 0
    for units in balance_ranks(np.arange(len(sizes)), sizes, world_size):
        mine = [parts[unit] for unit in units if unit < len(parts)]
        pieces = [piece for first, end, _ in mine for piece in line.cut(first, end, token_budget)]
        rest = alone[units[units >= len(parts)] - len(parts)]
        members = [*(line.places[first:end] for first, end, _ in pieces), *rest[:, None]]
        tokens = np.array([*(tokens for *_, tokens in pieces), *lengths[rest]], np.int64)
        bins = pack(np.arange(len(members)), tokens, token_budget)
        shares.append([ids[np.concatenate([members[unit] for unit in micro])] for micro in bins])
        computed += int(tokens.sum())
    return shares, computed
