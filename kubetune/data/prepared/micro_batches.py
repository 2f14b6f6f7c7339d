"""The samples of a step cut into shares of the ranks and into micro-batches: pure functions of lengths and costs.

Which samples make up a step is order.py's alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from kubetune.data.prepared.order import Ids

FILL_STARTS = 32

EXCHANGES = 8  # tries for each rank of a batch to even out what dealing leaves uneven
EVEN = 2_000  # the rank with the most has so small a part of the mean too much that nobody waits for it


def balance_ranks(
    ids: Ids, costs: Ids, world_size: int, max_per_rank: int | None = None
) -> list[Ids]:
    """Deal one global batch to the ranks so that they have about equally much to do, each its costliest sample first.

    `costs`: of every row, whole numbers: its tokens, or what these take. Costliest first to the rank with the least so
    far, then exchanged. `max_per_rank` caps the number of samples, for micro-batches of a fixed size.
    """
    cap = len(ids) if max_per_rank is None else max_per_rank
    if cap * world_size < len(ids):
        raise ValueError(f"{len(ids)} samples do not fit {world_size} ranks of at most {cap}")
    falling = ids[np.argsort(-costs[ids], kind="stable")]
    owner, counts = np.empty(len(ids), np.int64), [0] * world_size
    loads = [(0, rank) for rank in range(world_size)]
    for place, cost in enumerate(costs[falling].tolist()):
        load, rank = heapq.heappop(loads)
        owner[place] = rank
        counts[rank] += 1
        if counts[rank] < cap:
            heapq.heappush(loads, (load + cost, rank))
    _exchange(costs[falling], owner, world_size, cap)
    return [falling[owner == rank] for rank in range(world_size)]


def _exchange(costs: Ids, owner: Ids, world_size: int, cap: int) -> None:
    """Give samples of the rank with the most to do to one with little, or exchange them, while that lowers the most.

    Dealing alone leaves some per cent between the ranks where each has few samples; all wait for the last of them.
    `costs` fall; `owner`, the rank of each sample, is changed in place.
    """
    loads = np.zeros(world_size, np.int64)
    np.add.at(loads, owner, costs)
    for _ in range(EXCHANGES * world_size):
        most = int(loads.argmax())
        if (loads[most] - loads.mean()) * EVEN <= loads.mean():
            return
        for least in np.argsort(loads, kind="stable")[:EXCHANGES].tolist():
            moved = _best_exchange(costs, owner, most, least, int(loads[most] - loads[least]), cap)
            if moved:
                loads[most] -= moved
                loads[least] += moved
                break
        else:
            return


def _best_exchange(costs: Ids, owner: Ids, most: int, least: int, gap: int, cap: int) -> int:
    """Carry out the exchange that brings two ranks closest together; returns the cost it moves, 0 if none helps."""
    giving, taking = np.flatnonzero(owner == most), np.flatnonzero(owner == least)[::-1]
    free = len(taking) < cap
    back = (
        np.concatenate([[0], costs[taking]]) if free else costs[taking]
    )  # rising; 0: nothing is given back
    after = np.searchsorted(back, costs[giving] - gap // 2)
    places = np.clip(np.stack([after, after - 1]), 0, len(back) - 1)
    moved = costs[giving] - back[places]
    side, best = divmod(int(np.abs(gap - 2 * moved).argmin()), len(giving))
    if not 0 < moved[side, best] < gap:
        return 0
    owner[giving[best]] = least
    if (place := int(places[side, best]) - free) >= 0:
        owner[taking[place]] = most
    return int(moved[side, best])


def pack(ids: Ids, lengths: Ids, token_budget: int) -> list[Ids]:
    """Micro-batches of whole sequences within a token budget, first fit decreasing.

    A sequence longer than the budget gets a micro-batch of its own. Which sequences share one never changes the
    gradient, because the loss has one divisor for the whole global batch.
    """
    bins: list[tuple[int, list[int]]] = []
    for i in ids[np.argsort(-lengths[ids], kind="stable")]:
        length = int(lengths[i])
        slot = next((n for n, (used, _) in enumerate(bins) if used + length <= token_budget), None)
        if slot is None:
            bins.append((length, [int(i)]))
        else:
            used, members = bins[slot]
            bins[slot] = (used + length, [*members, int(i)])
    return [np.array(members, np.int64) for _, members in bins]


def fill(lengths: Ids, token_budget: int, most: int) -> Ids:
    """Row ids of a micro-batch about as full as `pack` makes any, of at most `most` rows.

    From each of a few lengths downwards the longest rows that still fit are taken; the fullest of these wins, and of
    equally full ones that with the longest rows.
    """
    by_length = np.argsort(-lengths, kind="stable")
    falling = -lengths[by_length]
    firsts = np.unique(falling, return_index=True)[1]
    starts = firsts[np.unique(np.linspace(0, len(firsts) - 1, FILL_STARTS).round().astype(int))]
    filled = [_fill_from(falling, int(start), token_budget, most) for start in starts]
    return by_length[min(filled, key=lambda chosen: int(falling[chosen].sum()))].astype(np.int64)


def _fill_from(falling: Ids, start: int, token_budget: int, most: int) -> list[int]:
    chosen, left = [start], token_budget + int(falling[start])
    while len(chosen) < most:
        place = max(chosen[-1] + 1, int(np.searchsorted(falling, -left)))
        if place >= len(falling):
            break
        chosen.append(place)
        left += int(falling[place])
    return chosen


def deal(groups: Sequence[Ids], lengths: Ids, world_size: int) -> list[list[Ids]]:
    """Whole micro-batches to the ranks so that these hold about equally many tokens; longest first."""
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
    """The micro-batches of every rank for one global batch: `[rank][micro] -> sample ids`.

    Ranks get equal shares of `costs`, where these are given, else of tokens. With a token budget they are packed;
    without one each holds `sequences` samples. Ranks may differ in the number of micro-batches, since gradients meet
    once per optimizer step.
    """
    costs = lengths if costs is None else costs
    if token_budget is not None:
        return [
            pack(share, lengths, token_budget) for share in balance_ranks(ids, costs, world_size)
        ]
    shares = balance_ranks(ids, costs, world_size, max_per_rank=-(-len(ids) // world_size))
    return [[share[i : i + sequences] for i in range(0, len(share), sequences)] for share in shares]
