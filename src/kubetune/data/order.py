"""Which samples each step has: pure functions of the seed, the epoch and the prepared lengths.

Nothing here is state, so a resumed run needs nothing saved, and any world size sees the same global batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


# Only hashlib and splitmix64 decide the order, not a library's random numbers: those may change between versions.


def mixed_seed(*salt: int | str) -> int:
    """Return a 63-bit seed from any number of ints and strings, the same in every process and version."""
    digest = hashlib.blake2b(repr(salt).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def hash_ids(ids: Ids, *salt: int | str) -> NDArray[np.uint64]:
    """Return a 64-bit hash of every id under a salt: splitmix64 of the id, offset by the salt's digest."""
    # The constants of splitmix64. Unsigned numbers wrap around, as its author means them to.
    offset = np.array([mixed_seed(*salt)], np.uint64)
    x = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + offset
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


def shuffled(ids: Ids, *salt: int | str) -> Ids:
    """Return ids in the order of their hashes: a random order, the same in every process and version."""
    return ids[np.argsort(hash_ids(ids, *salt), kind="stable")]


def epoch_order(
    seed: int,
    epoch: int,
    source: NDArray[np.integer],
    weights: Sequence[float],
) -> Ids:
    """Return the samples of one epoch, in order: row ids, `[epoch_size]`.

    `source` `[rows]`: the source of each row. A source of weight 2.5 is used twice whole, and a half of it that is
    drawn anew each epoch.
    """
    parts: list[Ids] = []
    for index, weight in enumerate(weights):
        rows = np.flatnonzero(source == index).astype(np.int64)
        if not len(rows):
            continue

        # 10 rows of weight 2.5 are 25 samples: two whole copies, and 5 rows drawn.
        samples = max(1, round(len(rows) * weight))
        copies, rest = divmod(samples, len(rows))
        parts += [rows] * copies
        if rest:
            # A random draw; sorted, as whole copies are.
            drawn = shuffled(rows, seed, epoch, "draw")[:rest]
            parts.append(np.sort(drawn))

    ids = np.empty(0, np.int64)
    if parts:
        ids = np.concatenate(parts)
    # Places are shuffled, not rows: copies of one row must not stay together.
    places = np.arange(len(ids))
    return ids[shuffled(places, seed, epoch, "order")]


def global_batch(
    order: Ids,
    step_in_epoch: int,
    global_batch_size: int,
) -> Ids:
    """Return the samples of one optimizer step; the last step of an epoch may have fewer."""
    start = step_in_epoch * global_batch_size
    return order[start : start + global_batch_size]


def step_boundaries(lengths: Ids, num_steps: int) -> Ids:
    """Return the bounds of an epoch's steps, `[num_steps + 1]`, such that all have about equally many tokens.

    `lengths`: of the epoch's samples, in its order. There are at least as many as steps, so each step gets one.

    Example: lengths 4 1 3 2 2 for two steps are 12 tokens, so the bound is where 6 are reached or nearly reached:
    after 4 1 (5 tokens), and the bounds are 0 2 5.
    """
    steps = np.arange(num_steps + 1)
    ends = np.concatenate([[0], np.cumsum(lengths)])  # tokens before each sample, and of all

    # 12 tokens in 5 steps: a share of 2, and a rest of 2, so 0 2 4 7 9 12 are wanted.
    share, rest = divmod(int(ends[-1]), num_steps)
    wanted = steps * share + steps * rest // num_steps  # whole numbers, the same on every machine

    # Each bound is the sample's end nearest to its place in the whole epoch: errors of steps do not add up.
    boundaries = np.searchsorted(ends, wanted)
    before = np.maximum(boundaries - 1, 0)
    is_before_nearer = wanted - ends[before] < ends[boundaries] - wanted
    boundaries = np.where(is_before_nearer, before, boundaries)

    # Where one sample is longer than a share, steps after it, and before it, take one sample each.
    boundaries = np.maximum.accumulate(boundaries - steps) + steps
    return np.minimum(boundaries, len(lengths) - num_steps + steps).astype(np.int64)
