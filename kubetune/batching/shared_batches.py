"""Packed batches in which beginnings that rows share stand once. What it is worth is data/prepared/prefixes.py's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch

from kubetune.batching.batch import Batch, collate
from kubetune.batching.beside import PrefixTree
from kubetune.data.prepared.prefixes import Segment, tree

if TYPE_CHECKING:
    from numpy.typing import NDArray


def collate_shared(rows: Sequence[tuple[NDArray[np.uint32], NDArray[np.bool_]]], samples: Sequence[int] = ()) -> Batch:
    """Lay sequences of (ids, trained) end to end, as `collate` does, but each beginning that some share only once.

    A label in a beginning counts for as many rows as train it. The first token of what is a row's own is predicted by
    the last of its beginning.
    """
    segments = tree([ids for ids, _ in rows])
    if len(segments) == len(rows):
        return collate(rows, samples)
    cu_seqlens = np.cumsum([0, *(segment.end - segment.start for segment in segments)])
    ids = np.concatenate([rows[s.rows[0]][0][s.start : s.end] for s in segments]).astype(np.int64)
    ends = np.empty(len(rows), np.int64)
    for segment, stop in zip(segments, cu_seqlens[1:], strict=True):
        ends[segment.rows] = stop - 1  # the last segment of a row comes behind those it goes on from
    owners, tokens = _labels(rows, segments, cu_seqlens)
    targets, entries, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    in_runs = np.argsort(counts, kind="stable")
    before = np.arange(len(ids)) - 1  # the token that predicts each
    before[cu_seqlens[:-1]] = [cu_seqlens[segment.parent + 1] - 1 for segment in segments]
    predicting, places = np.unique(before[targets[in_runs]], return_inverse=True)
    return Batch(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(np.concatenate([np.arange(s.start, s.end) for s in segments])),
        cu_seqlens=tuple(cu_seqlens.tolist()),
        rows=torch.from_numpy(predicting),
        labels=torch.from_numpy(ids[targets[in_runs]]),
        samples=tuple(int(s) for s in samples),
        label_counts=tuple(np.bincount(owners, minlength=len(rows)).tolist()),
        tree=PrefixTree(
            parents=tuple(segment.parent for segment in segments),
            places=torch.from_numpy(places),
            counts=tuple((len(list(run)), count) for count, run in groupby(counts[in_runs].tolist())),
            entries=torch.from_numpy(np.argsort(in_runs)[entries]),
            ends=torch.from_numpy(ends),
        ),
    )


def _labels(
    rows: Sequence[tuple[NDArray[np.uint32], NDArray[np.bool_]]],
    segments: Sequence[Segment],
    cu_seqlens: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Every label of every row: the row, in ascending order, and where the label stands in the batch."""
    owners, tokens = [], []
    for segment, first in zip(segments, cu_seqlens, strict=False):
        trained = np.stack([rows[row][1][segment.start : segment.end] for row in segment.rows]).astype(bool)
        trained[:, : segment.parent < 0] = False  # nothing predicts the first token of a row
        place, token = np.nonzero(trained)
        owners.append(segment.rows[place])
        tokens.append(first + token)
    all_owners, all_tokens = np.concatenate(owners), np.concatenate(tokens)
    order = np.lexsort((all_tokens, all_owners))
    return all_owners[order], all_tokens[order]
