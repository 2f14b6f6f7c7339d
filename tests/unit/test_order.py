"""Order: every sample of an epoch once, the same global batches at every world size, and a fair split of each."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubetune.data.order import (
    Ids,
    epoch_order,
    global_batch,
    hash_ids,
    mixed_seed,
    step_boundaries,
)
from kubetune.data.prepared.micro_batches import balance_ranks, deal, fill, pack, split_batch
from kubetune.data.row_counts import epoch_size

LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=500).map(
    lambda values: np.array(values, np.int64)
)
SEEDS = st.integers(0, 2**63 - 1)
WORLDS = st.integers(1, 9)
BUDGETS = st.none() | st.integers(1, 1000)


def one_source(rows: int) -> Ids:
    return np.zeros(rows, np.int64)


def ids_of(parts: list[Ids]) -> list[int]:
    return sorted(int(i) for part in parts for i in part)


def batches(order: Ids, size: int) -> list[Ids]:
    return [global_batch(order, step, size) for step in range(-(-len(order) // size))]


@given(rows=st.integers(1, 500), seed=SEEDS, epoch=st.integers(0, 50), size=st.integers(1, 64))
def test_global_batches_hold_every_sample_once_per_epoch(
    rows: int, seed: int, epoch: int, size: int
) -> None:
    parts = batches(epoch_order(seed, epoch, one_source(rows), [1.0]), size)
    assert ids_of(parts) == list(range(rows))
    assert all(len(part) == size for part in parts[:-1])
    assert 1 <= len(parts[-1]) <= size


@given(lengths=LENGTHS, data=st.data())
def test_steps_of_so_many_tokens_are_even_and_hold_every_sample_once(
    lengths: Ids, data: st.DataObject
) -> None:
    steps = data.draw(st.integers(1, len(lengths)))
    boundaries = step_boundaries(lengths, steps)
    assert (boundaries[0], boundaries[-1], len(boundaries)) == (0, len(lengths), steps + 1)
    assert (np.diff(boundaries) >= 1).all()
    tokens = np.add.reduceat(lengths, boundaries[:-1])
    if lengths.max() * steps <= lengths.sum():  # no row is longer than an even share
        assert abs(tokens - lengths.sum() / steps).max() <= lengths.max()


def test_a_row_longer_than_a_step_leaves_none_empty() -> None:
    assert step_boundaries(np.array([900, 1, 1, 1], np.int64), 4).tolist() == [0, 1, 2, 3, 4]
    assert step_boundaries(np.array([1, 1, 1, 900], np.int64), 3).tolist() == [0, 2, 3, 4]
    assert step_boundaries(np.array([10] * 12, np.int64), 4).tolist() == [0, 3, 6, 9, 12]


@given(lengths=LENGTHS, world=WORLDS, budget=BUDGETS, sequences=st.integers(1, 8))
def test_a_split_loses_and_repeats_nothing(
    lengths: Ids, world: int, budget: int | None, sequences: int
) -> None:
    ids = np.random.default_rng(len(lengths)).permutation(len(lengths)).astype(np.int64)
    split = split_batch(ids, lengths, world, token_budget=budget, sequences=sequences)
    assert len(split) == world
    assert ids_of([micro for rank in split for micro in rank]) == list(range(len(lengths)))
    for micro in (micro for rank in split for micro in rank):
        assert len(micro)
        if budget is None:
            assert len(micro) <= sequences
        else:
            assert len(micro) == 1 or lengths[micro].sum() <= budget


@given(lengths=LENGTHS, world=WORLDS, budget=st.integers(1, 1000))
def test_whole_batches_are_dealt_evenly(lengths: Ids, world: int, budget: int) -> None:
    groups = pack(np.arange(len(lengths), dtype=np.int64), lengths, budget)
    shares = deal(groups, lengths, world)
    assert len(shares) == world
    assert sorted(group.tolist() for share in shares for group in share) == sorted(
        group.tolist() for group in groups
    )
    loads = [sum(int(lengths[group].sum()) for group in share) for share in shares]
    assert max(loads) - min(loads) <= max(int(lengths[group].sum()) for group in groups)


@given(lengths=LENGTHS, world=WORLDS, sequences=st.integers(1, 4))
def test_fixed_micro_batches_keep_the_ranks_in_step(
    lengths: Ids, world: int, sequences: int
) -> None:
    ids = np.arange(len(lengths), dtype=np.int64)
    counts = [
        sum(map(len, rank))
        for rank in split_batch(ids, lengths, world, token_budget=None, sequences=sequences)
    ]
    assert max(counts) <= -(-len(lengths) // world)


@given(lengths=LENGTHS, seed=SEEDS, size=st.integers(1, 40), budget=BUDGETS)
def test_every_world_size_sees_the_same_steps(
    lengths: Ids, seed: int, size: int, budget: int | None
) -> None:
    order = epoch_order(seed, 0, one_source(len(lengths)), [1.0])
    for batch in batches(order, size):
        for world in (1, 2, 4):
            split = split_batch(batch, lengths, world, token_budget=budget, sequences=2)
            assert ids_of([micro for rank in split for micro in rank]) == sorted(batch.tolist())


@given(lengths=LENGTHS, world=WORLDS)
def test_ranks_hold_about_equally_many_tokens(lengths: Ids, world: int) -> None:
    ids = np.arange(len(lengths), dtype=np.int64)
    loads = [int(lengths[share].sum()) for share in balance_ranks(ids, lengths, world)]
    # Whoever was dealt a sample last had the fewest tokens then.
    assert max(loads) - min(loads) <= lengths.max()


@pytest.mark.parametrize("world", [2, 4])
def test_no_rank_waits_long_where_samples_can_be_exchanged(world: int) -> None:
    draw = np.random.default_rng(0)
    for _ in range(50):  # steps of 8 rows for each rank, of lengths as in instruction data
        costs = (np.exp(draw.normal(0, 0.5, 8 * world)) * 2**20).astype(np.int64)
        loads = [
            int(costs[share].sum()) for share in balance_ranks(np.arange(8 * world), costs, world)
        ]
        assert max(loads) * world <= 1.006 * sum(loads)


@given(lengths=LENGTHS, data=st.data())
def test_costs_decide_which_rank_and_lengths_which_batch(lengths: Ids, data: st.DataObject) -> None:
    costs = np.array(
        data.draw(st.lists(st.integers(1, 400), min_size=len(lengths), max_size=len(lengths))),
        np.int64,
    )
    ids = np.arange(len(lengths), dtype=np.int64)
    split = split_batch(ids, lengths, 3, token_budget=500, sequences=1, costs=costs)
    assert ids_of([micro for rank in split for micro in rank]) == ids.tolist()
    assert all(len(micro) == 1 or lengths[micro].sum() <= 500 for rank in split for micro in rank)
    loads = [sum(int(costs[micro].sum()) for micro in rank) for rank in split]
    assert max(loads) - min(loads) <= costs.max()


@given(lengths=LENGTHS, budget=st.integers(1, 2000))
def test_packing_fills_most_of_its_budget(lengths: Ids, budget: int) -> None:
    packed = pack(np.arange(len(lengths), dtype=np.int64), lengths, budget)
    loads = sorted(int(lengths[part].sum()) for part in packed)
    # First fit: no two micro-batches could have been one, so on average they are more than half full.
    assert len(loads) < 2 or loads[0] + loads[1] > budget


@given(LENGTHS, WORLDS, st.integers(400, 4000))
def test_the_fullest_batch_is_about_as_full_as_any(lengths: Ids, world: int, budget: int) -> None:
    most = -(-len(lengths) // world)
    chosen = fill(lengths, budget, most)
    assert len(set(chosen.tolist())) == len(chosen) <= most
    tokens = int(lengths[chosen].sum())
    assert tokens <= budget
    packed = split_batch(np.arange(len(lengths)), lengths, world, token_budget=budget, sequences=1)
    fullest = max(int(lengths[micro].sum()) for share in packed for micro in share)
    assert tokens >= 0.85 * fullest


def test_samples_that_do_not_fit_the_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="5 samples do not fit 2 ranks of at most 2"):
        balance_ranks(np.arange(5, dtype=np.int64), np.ones(5, np.int64), 2, max_per_rank=2)


@given(
    counts=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.1, 3.5), min_size=4, max_size=4),
    seed=SEEDS,
)
def test_a_source_appears_as_often_as_its_weight_says(
    counts: list[int], weights: list[float], seed: int
) -> None:
    source = np.repeat(np.arange(len(counts)), counts)
    weights = weights[: len(counts)]
    order = epoch_order(seed, 3, source, weights)
    assert len(order) == epoch_size(counts, weights)
    seen = Counter(order.tolist())
    for index, (count, weight) in enumerate(zip(counts, weights, strict=True)):
        times = [seen[int(row)] for row in np.flatnonzero(source == index)]
        assert sum(times) == (max(1, round(count * weight)) if count else 0)
        assert not times or max(times) - min(times) <= 1


def test_epochs_and_seeds_shuffle_anew() -> None:
    orders = [
        epoch_order(seed, epoch, one_source(200), [1.0]).tolist()
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    assert len({tuple(order) for order in orders}) == 4
    assert list(range(200)) not in orders


def test_a_half_of_a_source_is_drawn_anew_each_epoch() -> None:
    drawn = [set(epoch_order(0, epoch, one_source(100), [0.5]).tolist()) for epoch in range(2)]
    assert [len(rows) for rows in drawn] == [50, 50]
    assert drawn[0] != drawn[1]


def test_the_order_never_changes_between_versions() -> None:
    """A run goes on after an upgrade only if the same seed still means the same order."""
    assert mixed_seed(42, 0, "order") == 6040907643178874740
    assert hash_ids(np.arange(3), 7).tolist() == [
        7674609315995149848,
        9993953238217184452,
        15033089634830587429,
    ]
    assert epoch_order(42, 1, one_source(10), [1.0]).tolist() == [1, 0, 5, 8, 2, 7, 9, 4, 3, 6]
