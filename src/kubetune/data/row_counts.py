"""How many rows a run trains on and evaluates: a plan counts them before a record is read, the run then draws them."""

from __future__ import annotations

from collections.abc import Sequence


def held_out(rows: int, share: float) -> int:
    """Return how many of the rows of all sources are evaluated in place of trained on: at least one and never all."""
    return min(max(1, round(share * rows)), rows - 1)


def epoch_size(rows_per_source: Sequence[int], weights: Sequence[float]) -> int:
    """Return the samples in one epoch: each source `weight` times, rounded to whole rows but never to none."""
    size = 0
    for rows, weight in zip(rows_per_source, weights, strict=True):
        if rows:
            size += max(1, round(rows * weight))
    return size


def evaluated_rows(rows: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Return how many rows an evaluation takes of each source, so that it has the mix of an epoch of training.

    All of the source with the largest weight; of others a part, as their weight is smaller, but at least one row.
    """
    # Of sources with 100 and 100 rows and weights 1 and 0.25, 100 and 25 are taken.
    weights_in_use = [weight for count, weight in zip(rows, weights, strict=True) if count]
    largest = max(weights_in_use, default=1.0)
    taken = []
    for count, weight in zip(rows, weights, strict=True):
        share = max(1, round(count * weight / largest))
        taken.append(share if count else 0)
    return taken
