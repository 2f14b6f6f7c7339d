"""Take a batch apart into its rows, as somebody needs them who computes them elsewhere."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kubetune.batching.batch import Batch


@dataclass(frozen=True)
class WholeRow:
    """A row with what it shares with others, up to its last label."""

    sample: int  # of the data
    ids: list[int]
    places: list[int]  # of the tokens that predict its labels; none of a row without labels


def whole_rows(batch: Batch) -> list[WholeRow]:
    """Return the rows of a batch. Their labels, row after row, are those of its loss."""
    if not batch.num_labels:
        return []
    tree = batch.tree
    ends = [stop - 1 for stop in batch.cu_seqlens[1:]]
    predicting = batch.rows
    if tree is not None:
        ends = tree.ends.tolist()
        predicting = predicting[tree.places[tree.entries]]

    ids = batch.input_ids.tolist()
    places = batch.position_ids[predicting].split(list(batch.label_counts))
    rows = []
    samples = batch.samples or range(len(ends))
    for sample, end, of_row in zip(samples, ends, places, strict=True):
        known = of_row.tolist()
        row_ids = _row_ids(ids, batch.cu_seqlens, batch.parents, end)
        rows.append(WholeRow(sample, row_ids[: max(known, default=-2) + 2], known))
    return rows


def _row_ids(
    ids: list[int], cu_seqlens: Sequence[int], parents: Sequence[int], end: int
) -> list[int]:
    """Return the ids of the row whose last token is at `end`."""
    segment = bisect_right(cu_seqlens, end) - 1
    parts = []
    while segment >= 0:
        parts.append(ids[cu_seqlens[segment] : cu_seqlens[segment + 1]])
        segment = parents[segment] if parents else -1
    return [token for part in reversed(parts) for token in part]
