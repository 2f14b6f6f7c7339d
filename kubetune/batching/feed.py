"""The batches of every step for one rank, as a function of the step: no iterator, so nothing to fast-forward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from kubetune.batching.batch import Batch, collate, collate_labelled
from kubetune.batching.image_batches import PictureReader, collate_pictured, picture_reader
from kubetune.batching.prefix_sharing import collate_shared
from kubetune.data.prepared.micro_batches import deal, fill, pack, split_batch
from kubetune.data.prepared.order import (
    Ids,
    epoch_order,
    epoch_size,
    global_batch,
    hash_ids,
    step_boundaries,
)
from kubetune.data.prepared.prefixes import split_by_prefix
from kubetune.data.prepared.prepare import Rows
from kubetune.data.reading.sources import evaluated_rows
from kubetune.distributed.process_group import World
from kubetune.plan.plan import Plan

NOTHING: Ids = np.empty(0, np.int64)

EVALUATION_BATCHES = 32  # at least so many, where rows suffice, for any number of ranks to share
SMALLEST_BATCH_TOKENS = 256  # below that a batch costs more in calls than in arithmetic


@dataclass(frozen=True)
class Work:
    """One rank's share of an optimizer step, and the sizes of the whole global batch."""

    batches: list[Batch]  # this rank's micro-batches
    divisor: int  # what the summed loss is divided by
    labels: int  # labels of the global batch
    tokens: int  # tokens of the global batch
    samples: int  # rows of data of the global batch
    computed: int = 0  # tokens that go through the model, shared beginnings once; 0: not counted


class Feed:
    """Training batches. With `padding_free` False every sequence is a micro-batch of its own.

    `even`: every rank gets equally many micro-batches, because each takes all ranks; some may hold no sample then.
    `shares`: rows that begin alike are put together, and their beginnings computed once. `costs`: of every row, of
    which ranks get equal shares; left out, or where rows share beginnings, shares are of tokens.
    """

    def __init__(
        self,
        rows: Rows,
        plan: Plan,
        seed: int,
        world: World,
        *,
        padding_free: bool = True,
        even: bool = False,
        shares: bool = False,
        costs: NDArray[np.float64] | None = None,
    ) -> None:
        self._costs = None if costs is None or not costs.any() else whole(costs)
        self._rows, self._plan, self._seed, self._world, self._even = rows, plan, seed, world, even
        self.shares = shares
        self._reader = picture_reader(rows)
        self._token_budget = plan.micro_batch_tokens if padding_free else None
        self._sequences = plan.per_device_train_batch_size if padding_free else 1
        self._lengths = rows.lengths
        self._order = lru_cache(maxsize=2)(self._epoch_order)
        self._mine = lru_cache(maxsize=2)(
            self._split
        )  # a step's share is asked for again when images look ahead
        in_tokens = plan.global_batch_tokens is not None
        self.steps_per_epoch = (
            plan.steps_per_epoch
            if in_tokens
            else -(-rows_per_epoch(rows) // plan.global_batch_size)
        )
        self._boundaries = lru_cache(maxsize=2)(self._epoch_boundaries) if in_tokens else None

    def _epoch_order(self, epoch: int) -> Ids:
        return epoch_order(self._seed, epoch, self._rows.source, self._rows.weights)

    def _epoch_boundaries(self, epoch: int) -> Ids:
        return step_boundaries(self._lengths[self._order(epoch)], self.steps_per_epoch)

    def samples(self, step: int) -> Ids:
        """Row ids of the global batch of a step, the same on every rank and at every world size."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if self._boundaries is not None:
            first, end = self._boundaries(epoch)[index : index + 2]
            return self._order(epoch)[first:end]
        return global_batch(self._order(epoch), index, self._plan.global_batch_size)

    def step(self, step: int) -> Work:
        """This rank's micro-batches of a step."""
        ids = self.samples(step)
        mine, computed = self._mine(step)
        batches = [batch_of(self._rows, micro, self._reader, shares=self.shares) for micro in mine]
        if self._reader is not None:
            for micro in self._mine(step + 1)[0]:
                for row in micro:
                    self._reader.look_ahead(self._rows.images(int(row)))
        labels, tokens = int(self._rows.trained_counts[ids].sum()), int(self._lengths[ids].sum())
        return Work(
            batches,
            divisor=labels,
            labels=labels,
            tokens=tokens,
            samples=len(ids),
            computed=computed,
        )

    def step_tokens(self, step: int) -> tuple[int, int]:
        """Tokens of a step that go through the model, and all its tokens."""
        return self._mine(step)[1], int(self._lengths[self.samples(step)].sum())

    def largest(self) -> Batch:
        """A micro-batch about as large as the run's largest: the longest rows, as many as one can hold."""
        # A step of so many tokens may hold any number of rows.
        most = (
            len(self._lengths)
            if self._boundaries
            else -(-self._plan.global_batch_size // self._world.size)
        )
        if self._token_budget is None:
            ids = np.argsort(-self._lengths, kind="stable")[: min(most, self._sequences)]
        else:
            ids = fill(self._lengths, self._token_budget, most)
        return batch_of(self._rows, ids, self._reader)

    def _split(self, step: int) -> tuple[list[Ids], int]:
        """Row ids of this rank's micro-batches of a step, and the tokens that all ranks compute."""
        ids, size = self.samples(step), self._world.size
        if self.shares and self._token_budget is not None:
            split, computed = split_by_prefix(
                ids, self._rows.ids_of_sequences, size, self._token_budget
            )
        else:
            split = split_batch(
                ids,
                self._lengths,
                size,
                token_budget=self._token_budget,
                sequences=self._sequences,
                costs=self._costs,
            )
            computed = int(self._lengths[ids].sum())
        return (_evened(split) if self._even else split)[self._world.rank], computed


def whole(costs: NDArray[np.float64]) -> Ids:
    """Costs as whole numbers, about a million in the mean: they have one sum, in whatever order each rank adds."""
    found: Ids = np.rint(costs * (2**20 / costs.mean())).astype(np.int64)
    return found


def rows_per_epoch(rows: Rows) -> int:
    """Samples in an epoch: every row of every source, as often as its weight says."""
    return epoch_size(np.bincount(rows.source, minlength=len(rows.weights)).tolist(), rows.weights)


def tokens_per_epoch(rows: Rows) -> int:
    """Tokens of those samples; of a source that appears in part, as many as the mean row makes it."""
    tokens = np.bincount(rows.source, weights=rows.lengths, minlength=len(rows.weights))
    counts = np.bincount(rows.source, minlength=len(rows.weights)).tolist()
    sizes = [
        epoch_size([count], [weight]) for count, weight in zip(counts, rows.weights, strict=True)
    ]
    return sum(
        int(all_ * size) // count
        for all_, size, count in zip(tokens, sizes, counts, strict=True)
        if count
    )


def evaluated(rows: Rows) -> Ids:
    """The rows that an evaluation takes: all, or where the weights of their sources differ as many as mirror these."""
    counts = np.bincount(rows.source, minlength=len(rows.weights)).tolist()
    keys = hash_ids(np.arange(len(rows), dtype=np.int64), "evaluated")
    parts = []
    for source, number in enumerate(evaluated_rows(counts, rows.weights)):
        ids = np.flatnonzero(rows.source == source).astype(np.int64)
        parts.append(ids[np.argsort(keys[ids], kind="stable")[:number]])
    return np.sort(np.concatenate(parts)) if parts else NOTHING


def evaluation_batches(
    rows: Rows, plan: Plan, world: World, *, padding_free: bool = True, even: bool = False
) -> list[list[Ids]]:
    """Every row of `evaluated` once: `[rank][batch] -> row ids`. Batches hold at most training's budget of tokens.

    Which rows share a batch does not depend on the world, so that the last bit of every output does not either.
    `even`: equally many batches for every rank, some of them empty.
    """
    split = deal(
        groups(rows, plan, evaluated(rows), padding_free=padding_free), rows.lengths, world.size
    )
    return _evened(split) if even else split


def groups(rows: Rows, plan: Plan, ids: Ids, *, padding_free: bool) -> list[Ids]:
    """Rows that go through the model together where nothing is trained on them, whatever the world."""
    if padding_free and plan.micro_batch_tokens is not None:
        share = -(-int(rows.lengths[ids].sum()) // EVALUATION_BATCHES)
        return pack(
            ids, rows.lengths, min(plan.micro_batch_tokens, max(share, SMALLEST_BATCH_TOKENS))
        )
    size = plan.per_device_eval_batch_size if padding_free else 1
    by_length = ids[np.argsort(-rows.lengths[ids], kind="stable")]
    return [by_length[start : start + size] for start in range(0, len(ids), size)]


def _evened(split: list[list[Ids]]) -> list[list[Ids]]:
    longest = max(len(share) for share in split)
    return [share + [NOTHING] * (longest - len(share)) for share in split]


def batch_of(rows: Rows, ids: Ids, reader: PictureReader | None, *, shares: bool = False) -> Batch:
    """These rows as one batch of tensors; `reader` is `picture_reader(rows)`, kept from batch to batch."""
    if not len(ids):
        # One token and no label: it passes through the whole model, and adds nothing.
        nothing = [(np.zeros(1, np.uint32), np.zeros(1, bool))] * rows.sequences_per_row
        return (
            collate(nothing)
            if reader is None
            else collate_pictured(nothing, [[]], reader.processor)
        )
    samples = [int(i) for i in ids]
    if rows.is_labelled and rows.targets is not None:
        segments = [rows.segments(i) for i in samples]
        return collate_labelled(
            [rows.row(i)[0] for i in samples], segments, rows.targets[ids], samples
        )
    sequences = [sequence for i in samples for sequence in rows.sequences(i)]
    if reader is None:
        batch = (collate_shared if shares else collate)(sequences, samples)
    else:
        batch = collate_pictured(
            sequences, [reader.read(rows.images(i)) for i in samples], reader.processor, samples
        )
    targets, reference = (
        None if t is None else torch.from_numpy(t[ids]) for t in (rows.targets, rows.reference)
    )
    return replace(batch, targets=targets, reference=reference)
