"""Packed batches in which beginnings that rows share stand once.

PrefixTree (extra_inputs.py) shows one by small numbers. data/prepared/prefixes.py says what sharing is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch

from kubetune.batching.batch import Batch, collate
from kubetune.batching.extra_inputs import PrefixTree
from kubetune.data.prepared.prefixes import Segment, prefix_tree

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]
    Row = tuple[NDArray[np.uint32], NDArray[np.bool_]]  # ids, and which of them are trained


def collate_shared(rows: Sequence[Row], samples: Sequence[int] = ()) -> Batch:
    """Lay sequences of (ids, trained) end to end, as `collate` does, but each beginning that some share only once.

    A label in a beginning counts for as many rows as train it. The first token behind a beginning is predicted by the
    beginning's last one.
    """
    segments = prefix_tree([ids for ids, _ in rows])
    if len(segments) == len(rows):
        return collate(rows, samples)
    cu_seqlens = np.cumsum([0, *(segment.end - segment.start for segment in segments)])
    ids, positions = _tokens(rows, segments)
    owners, tokens = _labels(rows, segments, cu_seqlens)
    # Labels of the batch: each trained token once, those of fewest rows first, so that equal counts are runs.
    trained, entries, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    by_count = np.argsort(counts, kind="stable")
    targets = trained[by_count]
    before = _tokens_before(segments, cu_seqlens)
    predicting, places = np.unique(before[targets], return_inverse=True)
    runs = []
    for count, run in groupby(counts[by_count].tolist()):
        runs.append((len(list(run)), count))
    return Batch(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(positions),
        cu_seqlens=tuple(cu_seqlens.tolist()),
        rows=torch.from_numpy(predicting),
        labels=torch.from_numpy(ids[targets]),
        samples=tuple(int(sample) for sample in samples),
        label_counts=tuple(np.bincount(owners, minlength=len(rows)).tolist()),
        tree=PrefixTree(
            parents=tuple(segment.parent for segment in segments),
            places=torch.from_numpy(places),
            counts=tuple(runs),
            # argsort of a permutation is its inverse: where each of `trained` stands among the batch's labels
            entries=torch.from_numpy(np.argsort(by_count)[entries]),
            ends=torch.from_numpy(_ends(len(rows), segments, cu_seqlens)),
        ),
    )


def _tokens(rows: Sequence[Row], segments: Sequence[Segment]) -> tuple[Numbers, Numbers]:
    """Return ids and positions of all segments end to end; positions go on behind a beginning."""
    ids = []
    positions = []
    for segment in segments:
        row_ids, _ = rows[segment.rows[0]]
        ids.append(row_ids[segment.start : segment.end])
        positions.append(np.arange(segment.start, segment.end))
    return np.concatenate(ids).astype(np.int64), np.concatenate(positions)


def _tokens_before(segments: Sequence[Segment], cu_seqlens: Numbers) -> Numbers:
    """Return for each token of the batch the one that predicts it.

    That is the token in front, but behind a beginning its last one. What stands for the first token of a row is never
    asked for.
    """
    before = np.arange(cu_seqlens[-1]) - 1
    for segment, first in zip(segments, cu_seqlens, strict=False):
        before[first] = cu_seqlens[segment.parent + 1] - 1
    return before


def _ends(number: int, segments: Sequence[Segment], cu_seqlens: Numbers) -> Numbers:
    """Return the last token of each of `number` rows."""
    ends = np.empty(number, np.int64)
    for segment, stop in zip(segments, cu_seqlens[1:], strict=True):
        # The segments of a row come in its order, so that the last one wins.
        ends[segment.rows] = stop - 1
    return ends


def _labels(
    rows: Sequence[Row], segments: Sequence[Segment], cu_seqlens: Numbers
) -> tuple[Numbers, Numbers]:
    """Return every label of every row: the number of the row, in ascending order, and the label's token in the batch."""
    owners = []
    tokens = []
    for segment, first in zip(segments, cu_seqlens, strict=False):
        trained = np.stack([rows[row][1][segment.start : segment.end] for row in segment.rows])
        trained = trained.astype(bool)
        if segment.parent < 0:
            trained[:, 0] = False  # nothing predicts the first token of a row
        place, token = np.nonzero(trained)
        owners.append(segment.rows[place])
        tokens.append(first + token)
    all_owners = np.concatenate(owners)
    all_tokens = np.concatenate(tokens)
    order = np.lexsort((all_tokens, all_owners))
    return all_owners[order], all_tokens[order]
