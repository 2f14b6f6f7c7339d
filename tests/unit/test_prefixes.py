"""Beginnings that rows share: every token of every row is there, whatever is shared, and no row is lost or repeated."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubetune.batching.shared_beginnings import collate_shared
from kubetune.data.order import Ids
from kubetune.data.prepared import prefixes
from kubetune.data.prepared.micro_batches import split_batch
from kubetune.data.prepared.prefixes import (
    GRAIN,
    Tokens,
    prefix_tree,
    sort_by_prefix,
    split_by_prefix,
)

PIECES = [
    np.random.default_rng(number).integers(0, 50, 5 + 9 * number).astype(np.uint32)
    for number in range(8)
]
# Rows made of a few pieces, so that many begin alike, some are equal, and some are the beginning of another.
ROWS = st.lists(
    st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=4).map(
        lambda chosen: np.concatenate([PIECES[piece] for piece in chosen])
    ),
    min_size=1,
    max_size=24,
)


def read_back(rows: list[Tokens]) -> dict[int, list[int]]:
    """Return the ids of each row, by going up the tree from where it ends."""
    segments = prefix_tree(rows)
    parents = {segment.parent for segment in segments}
    by_row = {}
    for number, segment in enumerate(segments):
        if number in parents:
            continue
        (row,), path = segment.rows.tolist(), [segment]
        while path[0].parent >= 0:
            path.insert(0, segments[path[0].parent])
        assert [part.end for part in path[:-1]] == [part.start for part in path[1:]]
        by_row[row] = [int(i) for part in path for i in rows[part.rows[0]][part.start : part.end]]
    return by_row


@given(ROWS)
def test_a_tree_holds_every_row_and_each_ends_alone(rows: list[Tokens]) -> None:
    assert read_back(rows) == {number: row.tolist() for number, row in enumerate(rows)}


@given(ROWS)
def test_the_longest_row_of_a_tree_lies_in_the_order_of_its_tokens(rows: list[Tokens]) -> None:
    segments = prefix_tree(rows)
    for number, segment in enumerate(segments):
        assert segment.parent < number
        if segment.parent < 0:
            longest = max(len(rows[row]) for row in segment.rows)
            place = number
            last = segment
            while last.end < longest:
                place += 1
                assert segments[place].parent == place - 1
                last = segments[place]


@given(ROWS)
def test_a_tree_is_as_large_as_sorted_rows_less_what_each_shares(rows: list[Tokens]) -> None:
    _, shared = sort_by_prefix(rows)
    assert (
        sum(segment.end - segment.start for segment in prefix_tree(rows))
        == sum(map(len, rows)) - shared.sum()
    )
    assert not (shared % GRAIN).any()


def test_one_other_token_is_never_shared() -> None:
    row = np.arange(100, dtype=np.uint32)
    other = row.copy()
    other[40] = 7
    assert [segment.end for segment in prefix_tree([row, other]) if segment.parent < 0] == [
        40 // GRAIN * GRAIN
    ]
    other[3] = 7
    assert len(prefix_tree([row, other])) == 2


def test_beginnings_nest() -> None:
    trunk = np.arange(200, dtype=np.uint32)
    rows = [np.append(trunk[:n], 300 + n).astype(np.uint32) for n in (48, 96, 160, 160)]
    segments = prefix_tree(rows)
    depths: list[int] = []
    for segment in segments:
        depths.append(0 if segment.parent < 0 else depths[segment.parent] + 1)
    assert max(depths) == 3


@given(ROWS, st.integers(1, 5), st.integers(1, 600))
def test_a_split_keeps_rows_together_and_loses_none(
    rows: list[Tokens], world: int, budget: int
) -> None:
    lengths = np.array([len(row) for row in rows], np.int64)
    ids = np.random.default_rng(len(rows)).permutation(len(rows)).astype(np.int64)
    split, computed = split_by_prefix(ids, lambda i: [rows[i]], world, budget)
    assert len(split) == world
    micros = [micro for share in split for micro in share]
    assert sorted(int(i) for micro in micros for i in micro) == list(range(len(rows)))
    sizes = [
        sum(s.end - s.start for s in prefix_tree([rows[i] for i in micro])) for micro in micros
    ]
    assert all(len(micro) == 1 or size <= budget for micro, size in zip(micros, sizes, strict=True))
    assert sum(sizes) <= computed <= lengths.sum()


def test_rows_that_share_nothing_are_split_as_ever() -> None:
    draw = np.random.default_rng(0)
    rows = [draw.integers(0, 1000, draw.integers(20, 90)).astype(np.uint32) for _ in range(40)]
    lengths = np.array([len(row) for row in rows], np.int64)
    ids = draw.permutation(40).astype(np.int64)
    ours, computed = split_by_prefix(ids, lambda i: [rows[i]], 3, 200)
    theirs = split_batch(ids, lengths, 3, token_budget=200, sequences=1)
    assert as_lists(ours) == as_lists(theirs)
    assert computed == lengths.sum()


def test_the_example_of_prefixes_is_true() -> None:
    """The example in the docstring of prefixes.py."""
    letters = {letter: [number] * GRAIN for number, letter in enumerate("ABxyzq")}
    rows = []
    for word in ("ABx", "AByy", "Az", "q"):
        ids = np.concatenate([letters[letter] for letter in word])
        rows.append(ids.astype(np.uint32))
    order, shared = sort_by_prefix(rows)
    assert (order.tolist(), (shared // GRAIN).tolist()) == ([0, 1, 2, 3], [0, 2, 1, 0])
    segments = prefix_tree(rows)
    assert [(segment.parent, segment.rows.tolist()) for segment in segments] == [
        (-1, [0, 1, 2]), (0, [0, 1]), (1, [1]), (1, [0]), (0, [2]), (-1, [3]),
    ]  # fmt: skip
    assert sum(segment.end - segment.start for segment in segments) == 7 * GRAIN
    step = np.arange(4)
    assert split_by_prefix(step, lambda i: [rows[i]], 1, 7 * GRAIN)[1] == 7 * GRAIN
    split, computed = split_by_prefix(step, lambda i: [rows[i]], 1, 5 * GRAIN)
    assert as_lists(split) == [[[0, 1], [2, 3]]]
    assert computed == 8 * GRAIN


def as_lists(split: list[list[Ids]]) -> list[list[list[int]]]:
    return [[micro.tolist() for micro in share] for share in split]


def test_ranks_share_a_common_beginning_evenly() -> None:
    trunk = np.arange(1000, dtype=np.uint32)
    rows = [np.append(trunk, np.full(200 + 3 * n, 2000 + n)).astype(np.uint32) for n in range(16)]
    lengths = np.array([len(row) for row in rows], np.int64)
    split, computed = split_by_prefix(np.arange(16), lambda i: [rows[i]], 2, 10_000)
    loads = [
        sum(s.end - s.start for micro in share for s in prefix_tree([rows[i] for i in micro]))
        for share in split
    ]
    assert sum(loads) == computed
    assert max(loads) - min(loads) <= lengths.max() - 992
    assert computed < lengths.sum() / 3


def test_the_example_of_a_prefix_tree_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    """The picture in PrefixTree's docstring, which has grains of one token."""
    monkeypatch.setattr(prefixes, "GRAIN", 1)
    s, a, b, c = 9, 10, 11, 12
    rows = [
        (np.array([s, s, s, a], np.uint32), np.array([False, True, False, True])),
        (np.array([s, s, s, b, c], np.uint32), np.array([False, True, False, True, True])),
    ]
    batch = collate_shared(rows)
    assert batch.tree is not None
    assert batch.input_ids.tolist() == [s, s, s, b, c, a]
    assert batch.cu_seqlens == (0, 3, 5, 6)
    assert batch.tree.parents == (-1, 0, 0)
    assert batch.labels.tolist() == [b, c, a, s]
    assert batch.rows.tolist() == [0, 2, 3]
    assert batch.tree.places.tolist() == [1, 2, 1, 0]
    assert batch.tree.counts == ((3, 1), (1, 2))
    assert batch.tree.entries.tolist() == [3, 2, 3, 0, 1]
    assert batch.tree.ends.tolist() == [5, 4]
