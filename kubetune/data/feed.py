"""The batches of every step for one rank, as a function of the step: no iterator, so nothing to fast-forward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from kubetune.data.batches import Batch, collate, collate_labelled
from kubetune.data.order import Ids, epoch_order, epoch_size, global_batch, hash_ids, split_batch
from kubetune.data.prepare import Rows
from kubetune.parallel import World
from kubetune.plan import Plan


@dataclass(frozen=True)
class Work:
    """One rank's share of an optimizer step, and the sizes of the whole global batch."""

    batches: list[Batch]
    labels: int
    tokens: int
    samples: int


class Feed:
    """Training batches. With `flat` False every sequence is a micro-batch of its own."""

    def __init__(self, rows: Rows, plan: Plan, seed: int, world: World, *, flat: bool = True) -> None:
        self._rows, self._plan, self._seed, self._world = rows, plan, seed, world
        self._token_budget = plan.micro_batch_tokens if flat else None
        self._sequences = plan.per_device_train_batch_size if flat else 1
        self._lengths = rows.lengths
        self._order = lru_cache(maxsize=2)(self._epoch_order)
        self.steps_per_epoch = -(-rows_per_epoch(rows) // plan.global_batch_size)

    def _epoch_order(self, epoch: int) -> Ids:
        return epoch_order(self._seed, epoch, self._rows.source, self._rows.weights)

    def samples(self, step: int) -> Ids:
        """Row ids of the global batch of a step, the same on every rank and at every world size."""
        epoch, index = divmod(step, self.steps_per_epoch)
        return global_batch(self._order(epoch), index, self._plan.global_batch_size)

    def step(self, step: int) -> Work:
        """This rank's micro-batches of a step."""
        ids = self.samples(step)
        split = split_batch(
            ids, self._lengths, self._world.size, token_budget=self._token_budget, sequences=self._sequences
        )
        return Work(
            batches=[_collate(self._rows, micro) for micro in split[self._world.rank]],
            labels=int(self._rows.trained_counts[ids].sum()),
            tokens=int(self._lengths[ids].sum()),
            samples=len(ids),
        )


def rows_per_epoch(rows: Rows) -> int:
    """Samples in an epoch: every row of every source, as often as its weight says."""
    return epoch_size(np.bincount(rows.source, minlength=len(rows.weights)).tolist(), rows.weights)


def evaluation_batches(
    rows: Rows, plan: Plan, world: World, *, flat: bool = True, limit: int | None = None
) -> list[list[Ids]]:
    """Every row exactly once: `[rank][batch] -> row ids`. Batches hold training's budget of tokens."""
    ids = np.arange(len(rows), dtype=np.int64)
    if limit is not None:
        ids = np.sort(ids[np.argsort(hash_ids(ids, "evaluation sample"), kind="stable")][:limit])
    budget = plan.micro_batch_tokens if flat else None
    sequences = plan.per_device_eval_batch_size if flat else 1
    return split_batch(ids, rows.lengths, world.size, token_budget=budget, sequences=sequences)


def evaluation_batch(rows: Rows, ids: Ids) -> Batch:
    """One evaluation batch as tensors."""
    return _collate(rows, ids)


def _collate(rows: Rows, ids: Ids) -> Batch:
    samples = [int(i) for i in ids]
    if rows.targets is None:
        return collate([rows.row(i) for i in samples], samples)
    segments = [rows.segments(i) for i in samples]
    return collate_labelled([rows.row(i)[0] for i in samples], segments, rows.targets[ids], samples)
