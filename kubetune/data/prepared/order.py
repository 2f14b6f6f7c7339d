"""The samples of each step: pure functions of the seed, the epoch and the prepared lengths.

Nothing here is state, so nothing has to be saved to resume a run, and another world size sees the same global
batches. The hash is spelled out (splitmix64) because library generators may change their streams between versions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


def mixed_seed(*salt: int | str) -> int:
    """A 63-bit seed from any number of ints and strings, the same in every process and version."""
    return (
        int.from_bytes(hashlib.blake2b(repr(salt).encode(), digest_size=8).digest(), "little") >> 1
    )


def hash_ids(ids: Ids, *salt: int | str) -> NDArray[np.uint64]:
    """A 64-bit hash of every id under a salt (splitmix64 of the id, offset by the salt's digest)."""
    x = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.array(
        [mixed_seed(*salt)], np.uint64
    )
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


def epoch_size(rows_per_source: Sequence[int], weights: Sequence[float]) -> int:
    """Samples in one epoch: each source counted `weight` times, a fraction rounded to whole rows (never to none)."""
    return sum(
        max(1, round(rows * weight))
        for rows, weight in zip(rows_per_source, weights, strict=True)
        if rows
    )


def epoch_order(
    seed: int, epoch: int, source: NDArray[np.integer], weights: Sequence[float]
) -> Ids:
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
