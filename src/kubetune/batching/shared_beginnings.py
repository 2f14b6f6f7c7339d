"""Make packed batches in which prefixes that rows share occur once.

data/prepared/prefixes.py finds the prefixes. PrefixTree (extra_inputs.py) says what the results mean.

The example of PrefixTree goes through this file so. Trained tokens have a *:

    rows      0: S S* S a*       1: S S* S b* c*

    segments  prefix_tree     0: S S S of rows 0 1    1: b c of row 1    2: a of row 0
    token                        0 1 2                   3 4                5

    _labels          (row, token) of every label of every row       (0, 1) (0, 5) (1, 1) (1, 3) (1, 4)
    trained          each token once                                1  3  4  5
    counts           rows that train it                             2  1  1  1
    targets          fewest rows first: the batch's labels          3  4  5  1     b c a S
    _tokens_before   the tokens that predict those                  2  3  2  0     (5 is predicted by 2, not by 4)
    predicting       each of these once: Batch.rows                 0  2  3
    places           index into Batch.rows for each label           1  2  1  0
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

    from kubetune.data.prepared.rows import TrainedIds

    Numbers = NDArray[np.int64]


def collate_shared(rows: Sequence[TrainedIds], samples: Sequence[int] = ()) -> Batch:
    """Lay sequences of (ids, trained) end to end, as `collate` does, but each shared prefix only once.

    A label in a prefix counts for as many rows as train it. The last token of a prefix predicts the first token of every
    sequence that continues it.
    """
    segments = prefix_tree([ids for ids, _ in rows])
    if len(segments) == len(rows):  # nothing is shared
        return collate(rows, samples)

    lengths = [segment.end - segment.start for segment in segments]
    cu_seqlens = np.cumsum([0, *lengths])
    ids, positions = _tokens(rows, segments)
    owners, tokens = _labels(rows, segments, cu_seqlens)

    # The batch's labels: each trained token once, those of the fewest rows first, so that equal counts are runs.
    trained, entries, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    by_count = np.argsort(counts, kind="stable")
    targets = trained[by_count]

    before = _tokens_before(segments, cu_seqlens)
    predicting, places = np.unique(before[targets], return_inverse=True)
    # counts 1 1 1 2 are the runs (3, 1) (1, 2)
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
            # argsort of a permutation is its inverse: the index of each of `trained` among the batch's labels.
            entries=torch.from_numpy(np.argsort(by_count)[entries]),
            ends=torch.from_numpy(_ends(len(rows), segments, cu_seqlens)),
        ),
    )


def _tokens(rows: Sequence[TrainedIds], segments: Sequence[Segment]) -> tuple[Numbers, Numbers]:
    """Return ids and positions of all segments end to end. Positions count from the beginning of the row."""
    ids = []
    positions = []
    for segment in segments:
        row_ids, _ = rows[segment.rows[0]]  # any of its rows: they have the same tokens here
        ids.append(row_ids[segment.start : segment.end])
        positions.append(np.arange(segment.start, segment.end))
    return np.concatenate(ids).astype(np.int64), np.concatenate(positions)


def _tokens_before(segments: Sequence[Segment], cu_seqlens: Numbers) -> Numbers:
    """Return for each token of the batch the token that predicts it.

    That is the token in front of it, but for the first one of a segment the last token of its parent. The entry for the
    first token of a row means nothing and is never used.
    """
    before = np.arange(cu_seqlens[-1]) - 1
    for segment, first in zip(segments, cu_seqlens, strict=False):
        before[first] = cu_seqlens[segment.parent + 1] - 1
    return before


def _ends(
    number: int,
    segments: Sequence[Segment],
    cu_seqlens: Numbers,
) -> Numbers:
    """Return the last token of each of `number` rows."""
    ends = np.empty(number, np.int64)
    for segment, stop in zip(segments, cu_seqlens[1:], strict=True):
        # The segments of a row come in its order, so that the last one wins.
        ends[segment.rows] = stop - 1
    return ends


def _labels(
    rows: Sequence[TrainedIds],
    segments: Sequence[Segment],
    cu_seqlens: Numbers,
) -> tuple[Numbers, Numbers]:
    """Return every label of every row: its row, rising, and its token in the batch. Both `[labels of all rows]`."""
    owners = []
    tokens = []
    for segment, first in zip(segments, cu_seqlens, strict=False):
        # Whether a token is trained may differ between rows that share it.
        of_rows = []
        for row in segment.rows:
            _, trained_of_row = rows[row]
            of_rows.append(trained_of_row[segment.start : segment.end])
        trained = np.stack(of_rows).astype(bool)  # [rows of the segment, its tokens]
        if segment.parent < 0:
            trained[:, 0] = False  # nothing predicts the first token of a row
        place, token = np.nonzero(trained)
        owners.append(segment.rows[place])
        tokens.append(first + token)

    all_owners = np.concatenate(owners)
    all_tokens = np.concatenate(tokens)
    # Row after row, and within a row in the order of its tokens. Segments come in another order.
    order = np.lexsort((all_tokens, all_owners))
    return all_owners[order], all_tokens[order]
