"""The samples of each step: pure functions of the seed, the epoch and the prepared lengths.

Nothing here is state, so nothing has to be saved to resume a run, and another world size sees the same global
batches. The hash is spelled out (splitmix64) because library generators may change their streams between versions.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

FILL_STARTS = 32


def mixed_seed(*salt: int | str) -> int:
    """A 63-bit seed from any number of ints and strings, the same in every process and version."""
    return int.from_bytes(hashlib.blake2b(repr(salt).encode(), digest_size=8).digest(), "little") >> 1


def hash_ids(ids: Ids, *salt: int | str) -> NDArray[np.uint64]:
    """A 64-bit hash of every id under a salt (splitmix64 of the id, offset by the salt's digest)."""
    x = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.array([mixed_seed(*salt)], np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


def epoch_size(rows_per_source: Sequence[int], weights: Sequence[float]) -> int:
    """Samples in one epoch: each source counted `weight` times, a fraction rounded to whole rows (never to none)."""
    return sum(max(1, round(rows * weight)) for rows, weight in zip(rows_per_source, weights, strict=True) if rows)


def epoch_order(seed: int, epoch: int, source: NDArray[np.integer], weights: Sequence[float]) -> Ids:
    """The samples of one epoch, in order.

    `source[i]` is the source of row i. A source of weight 2.5 appears twice whole and once as a half that is drawn
    anew each epoch. Returns row ids, `[epoch_size]`.
    """
    parts: list[Ids] = []
    for index, weight in enumerate(weights):
        rows = np.flatnonzero(source == index).astype(np.int64)
        if not len(rows):
            continue
        copies, rest = divmod(max(1, round(len(rows) * weight)), len(rows))
        parts += [rows] * copies
        if rest:
            drawn = np.argsort(hash_ids(rows, seed, epoch, "draw"), kind="stable")[:rest]
            parts.append(rows[np.sort(drawn)])
    ids = np.concatenate(parts) if parts else np.empty(0, np.int64)
    return ids[np.argsort(hash_ids(np.arange(len(ids)), seed, epoch, "order"), kind="stable")]


def global_batch(order: Ids, step_in_epoch: int, global_batch_size: int) -> Ids:
    """The samples of one optimizer step; the last step of an epoch may have fewer."""
    return order[step_in_epoch * global_batch_size : (step_in_epoch + 1) * global_batch_size]


def step_boundaries(lengths: Ids, num_steps: int) -> Ids:
    """Bounds of an epoch's steps, `[num_steps + 1]`, such that all hold about equally many tokens.

    `lengths`: of the epoch's samples, in its order, at least as many as steps: none is left without a sample.
    """
    steps, ends = np.arange(num_steps + 1), np.concatenate([[0], np.cumsum(lengths)])
    share, rest = divmod(int(ends[-1]), num_steps)
    wanted = steps * share + steps * rest // num_steps  # whole numbers, the same on every machine
    # Each bound is the sample's end nearest to its place in the whole epoch: errors of steps do not add up.
    boundaries = np.searchsorted(ends, wanted)
    before = np.maximum(boundaries - 1, 0)
    boundaries = np.where(wanted - ends[before] < ends[boundaries] - wanted, before, boundaries)
    # Where one sample is longer than a share, steps after it, and before it, take one sample each.
    boundaries = np.maximum.accumulate(boundaries - steps) + steps
    return np.minimum(boundaries, len(lengths) - num_steps + steps).astype(np.int64)


def balance_ranks(ids: Ids, lengths: Ids, world_size: int, max_per_rank: int | None = None) -> list[Ids]:
    """Deal one global batch to the ranks so that they hold about equally many tokens.

    Longest first to the rank with the fewest tokens so far. `max_per_rank` caps the number of samples, for
    micro-batches of a fixed size.
    """
    cap = len(ids) if max_per_rank is None else max_per_rank
    if cap * world_size < len(ids):
        raise ValueError(f"{len(ids)} samples do not fit {world_size} ranks of at most {cap}")
    shares: list[list[int]] = [[] for _ in range(world_size)]
    loads = [(0, rank) for rank in range(world_size)]
    for i in np.argsort(-lengths[ids], kind="stable"):
        load, rank = heapq.heappop(loads)
        shares[rank].append(int(ids[i]))
        if len(shares[rank]) < cap:
            heapq.heappush(loads, (load + int(lengths[ids[i]]), rank))
    return [np.array(share, np.int64) for share in shares]


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
    ids: Ids, lengths: Ids, world_size: int, *, token_budget: int | None, sequences: int
) -> list[list[Ids]]:
    """The micro-batches of every rank for one global batch: `[rank][micro] -> sample ids`.

    With a token budget they are packed; without one each holds `sequences` samples. Ranks may differ in the number
    of micro-batches, since gradients meet once per optimizer step.
    """
    if token_budget is not None:
        return [pack(share, lengths, token_budget) for share in balance_ranks(ids, lengths, world_size)]
    shares = balance_ranks(ids, lengths, world_size, max_per_rank=-(-len(ids) // world_size))
    return [[share[i : i + sequences] for i in range(0, len(share), sequences)] for share in shares]
