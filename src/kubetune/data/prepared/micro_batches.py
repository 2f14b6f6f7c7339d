"""Divide the samples of a step among ranks and micro-batches: pure functions of lengths and costs.

order.py alone decides which samples make up a step.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from kubetune.data.order import Ids

FILL_STARTS = 32  # lengths from which `fill` starts, at most

# How long `balance_ranks` tries to even out what dealing leaves uneven.
EXCHANGES = 8  # tries for each rank
EVEN = 2_000  # stop once the rank with the most has less than 1/EVEN more than the mean


def balance_ranks(
    ids: Ids,
    costs: Ids,
    world_size: int,
    max_per_rank: int | None = None,
) -> list[Ids]:
    """Deal a global batch to the ranks so that all have about equally much to do. Each rank's costliest sample is first.

    `costs` `[rows]`: what each row takes, in whole numbers such as its tokens. `max_per_rank` caps the number of
    samples, for micro-batches of a fixed size.

    Example: samples that cost 7 5 4 4 2, for two ranks. Each one goes to the rank with the least so far:
        rank 0: 7 4    = 11
        rank 1: 5 4 2  = 11
    """
    cap = len(ids) if max_per_rank is None else max_per_rank
    if cap * world_size < len(ids):
        raise ValueError(f"{len(ids)} samples do not fit {world_size} ranks of at most {cap}")

    # Costliest first: small samples that come last fill the gaps.
    falling = ids[np.argsort(-costs[ids], kind="stable")]
    owner = np.empty(len(ids), np.int64)
    counts = [0] * world_size
    # The heap's top is the rank with the least to do. A full rank does not come back into it.
    loads = [(0, rank) for rank in range(world_size)]
    for place, cost in enumerate(costs[falling].tolist()):
        load, rank = heapq.heappop(loads)
        owner[place] = rank
        counts[rank] += 1
        if counts[rank] < cap:
            heapq.heappush(loads, (load + cost, rank))

    _exchange(costs[falling], owner, world_size, cap)
    return [falling[owner == rank] for rank in range(world_size)]


def _exchange(
    costs: Ids,
    owner: Ids,
    world_size: int,
    cap: int,
) -> None:
    """Move samples from the rank with the most to do to ranks with little, while that lowers the most.

    Dealing alone leaves ranks with few samples some per cent apart, and all ranks wait for the slowest.
    `costs` `[samples]` fall. `owner` `[samples]`, the rank of each sample, is changed in place.
    """
    loads = np.zeros(world_size, np.int64)
    # Not `loads[owner] += costs`, which counts one sample of each rank.
    np.add.at(loads, owner, costs)
    for _ in range(EXCHANGES * world_size):
        most = int(loads.argmax())
        excess = loads[most] - loads.mean()
        is_even = excess * EVEN <= loads.mean()
        if is_even or not _relieve(costs, owner, loads, most, cap):
            return


def _relieve(
    costs: Ids,
    owner: Ids,
    loads: Ids,
    most: int,
    cap: int,
) -> bool:
    """Exchange samples between the rank `most` and the first of the idlest ranks where it helps. True if one was found."""
    # The idlest rank first. It may have no sample that fits, then the next one may.
    for least in np.argsort(loads, kind="stable")[:EXCHANGES].tolist():
        gap = int(loads[most] - loads[least])
        moved = _best_exchange(costs, owner, most, least, gap, cap)
        if moved:
            loads[most] -= moved
            loads[least] += moved
            return True

    return False


def _best_exchange(
    costs: Ids,
    owner: Ids,
    most: int,
    least: int,
    gap: int,
    cap: int,
) -> int:
    """Do the exchange that brings two ranks closest together. Return the cost that it moves, 0 if none helps.

    Example: one rank has 9 6 = 15, the other 5 2 = 7, so the gap is 8 and the best is to move half of it.
    9 for 5 moves 4: both ranks then have 11.
    """

    giving = np.flatnonzero(owner == most)
    taking = np.flatnonzero(owner == least)[::-1]
    back = costs[taking]  # rises, since `costs` fall
    may_keep_all = len(taking) < cap
    if may_keep_all:
        back = np.concatenate([[0], back])  # 0: nothing is given back

    # For each sample to give, the two samples to take back that are next to the ideal cost, above and below it.
    above = np.searchsorted(back, costs[giving] - gap // 2)
    candidates = np.clip(np.stack([above, above - 1]), 0, len(back) - 1)
    moved = costs[giving] - back[candidates]  # [2, giving]
    gap_left = np.abs(gap - 2 * moved)

    # An exchange that moves the whole gap or more would only swap the two ranks.
    side, best = divmod(int(gap_left.argmin()), len(giving))
    if not 0 < moved[side, best] < gap:
        return 0

    owner[giving[best]] = least
    returned = int(candidates[side, best])
    if may_keep_all:
        returned -= 1  # the 0 in front is no sample
    if returned >= 0:
        owner[taking[returned]] = most
    return int(moved[side, best])


def pack(ids: Ids, lengths: Ids, token_budget: int) -> list[Ids]:
    """Return micro-batches of whole sequences within a token budget, first fit decreasing.

    A sequence longer than the budget gets a micro-batch of its own. Which sequences are together never changes the
    gradient, because the loss has one divisor for the whole global batch.
    """
    # Longest first, each into the first micro-batch with room. Budget 8, lengths 5 4 4 3:
    #     5 3    4 4
    used: list[int] = []  # tokens of each micro-batch
    members: list[list[int]] = []  # row ids of each micro-batch
    for i in ids[np.argsort(-lengths[ids], kind="stable")]:
        length = int(lengths[i])
        for place, tokens in enumerate(used):
            if tokens + length <= token_budget:
                used[place] += length
                members[place].append(int(i))
                break
        else:  # it fits nowhere
            used.append(length)
            members.append([int(i)])

    return [np.array(rows, np.int64) for rows in members]


def fill(lengths: Ids, token_budget: int, most: int) -> Ids:
    """Return the row ids of one micro-batch of at most `most` rows, about as full as any that `pack` makes.

    From some starting lengths on, take the longest rows that still fit. The fullest result wins; of equally full
    ones, the one with the longest rows.
    """
    # The longest rows alone might leave a gap that no row fills: budget 10, lengths 6 5 5. Starting at 5 fills it.
    by_length = np.argsort(-lengths, kind="stable")
    falling = lengths[by_length]

    # Start at the first row of up to FILL_STARTS different lengths, spread evenly.
    firsts = np.unique(-falling, return_index=True)[1]
    chosen_starts = np.linspace(0, len(firsts) - 1, FILL_STARTS).round().astype(int)
    fullest: list[int] = []
    most_tokens = -1
    for start in firsts[np.unique(chosen_starts)]:
        chosen = _fill_from(falling, int(start), token_budget, most)
        tokens = int(falling[chosen].sum())
        if tokens > most_tokens:
            fullest = chosen
            most_tokens = tokens

    return by_length[fullest].astype(np.int64)


def _fill_from(
    falling: Ids,
    start: int,
    token_budget: int,
    most: int,
) -> list[int]:
    """Return places in `falling`: `start`, then always the next one that still fits."""
    rising = -falling  # searchsorted wants rising numbers
    chosen = [start]
    left = token_budget - int(falling[start])
    while len(chosen) < most:
        # Lengths 9 7 4 2 with 5 tokens left: the first that fits is 4.
        first_that_fits = int(np.searchsorted(rising, -left))
        place = max(chosen[-1] + 1, first_that_fits)
        if place >= len(falling):
            break
        chosen.append(place)
        left -= int(falling[place])

    return chosen


def deal(
    groups: Sequence[Ids],
    lengths: Ids,
    world_size: int,
) -> list[list[Ids]]:
    """Deal whole micro-batches to the ranks so that these hold about equally many tokens; longest first."""
    shares: list[list[Ids]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for group in sorted(groups, key=lambda group: -int(lengths[group].sum())):
        rank = loads.index(min(loads))
        loads[rank] += int(lengths[group].sum())
        shares[rank].append(group)

    return shares


def split_batch(
    ids: Ids,
    lengths: Ids,
    world_size: int,
    *,
    token_budget: int | None,
    sequences: int,
    costs: Ids | None = None,
) -> list[list[Ids]]:
    """Return the micro-batches of every rank for one global batch: `[rank][micro] -> sample ids`.

    Ranks get equal shares of `costs`, by default the tokens. With a token budget the shares are packed; without one
    each micro-batch holds `sequences` samples. Ranks may differ in their number of micro-batches, since gradients
    meet once per optimizer step.
    """
    if costs is None:
        costs = lengths
    ranks = []
    if token_budget is not None:
        for share in balance_ranks(ids, costs, world_size):
            ranks.append(pack(share, lengths, token_budget))
        return ranks

    # Equally many samples, so that no rank has one micro-batch more than the others.
    most_samples = -(-len(ids) // world_size)
    for share in balance_ranks(ids, costs, world_size, max_per_rank=most_samples):
        starts = range(0, len(share), sequences)
        ranks.append([share[start : start + sequences] for start in starts])
    return ranks
