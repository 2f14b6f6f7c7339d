"""The batches of every step for one rank, as a function of the step: no iterator, so nothing to fast-forward."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from kubetune.batching.batch import Batch, collate, collate_labelled
from kubetune.batching.image_batches import PictureReader, collate_pictured, picture_reader
from kubetune.batching.shared_beginnings import collate_shared
from kubetune.data.order import (
    Ids,
    epoch_order,
    global_batch,
    shuffled,
    step_boundaries,
)
from kubetune.data.prepared.micro_batches import deal, fill, pack, split_batch
from kubetune.data.prepared.prefixes import split_by_prefix
from kubetune.data.prepared.prepare import Rows
from kubetune.data.row_counts import epoch_size, evaluated_rows
from kubetune.distributed.process_group import World
from kubetune.plan.plan import Plan

if TYPE_CHECKING:
    from kubetune.data.prepared.rows import TrainedIds

NOTHING: Ids = np.empty(0, np.int64)

# Batches of an evaluation, if there are enough rows, so that any number of ranks can share them.
EVALUATION_BATCHES = 32
# A smaller batch costs more in calls than in arithmetic.
SMALLEST_BATCH_TOKENS = 256


@dataclass(frozen=True)
class Work:
    """One rank's share of an optimizer step, and the sizes of the whole global batch."""

    batches: list[Batch]  # this rank's micro-batches
    # Of the global batch:
    divisor: int  # what the summed loss is divided by
    labels: int
    tokens: int
    samples: int  # rows of data
    computed: int = 0  # tokens that go through the model, shared prefixes once; 0 if not counted

    # Of drawn answers: numbers of theirs to be logged, and how long parts of the drawing took.
    measured: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class Feed:
    """The training batches of one rank."""

    def __init__(
        self,
        rows: Rows,
        plan: Plan,
        seed: int,
        world: World,
        *,
        padding_free: bool = True,
        even: bool = False,
        share_prefixes: bool = False,
        costs: NDArray[np.float64] | None = None,
    ) -> None:
        """Decide how rows become micro-batches.

        `padding_free`: False makes every sequence a micro-batch of its own. `even`: give every rank equally many
        micro-batches, some of them empty, because each one takes all ranks (FSDP). `share_prefixes`: put rows with the
        same prefix together, and compute it once. `costs` `[rows]`: give ranks equal shares of these; without them, or
        with shared prefixes, ranks get equal shares of tokens.
        """
        self._rows = rows
        self._plan = plan
        self._seed = seed
        self._world = world
        self._even = even
        self.share_prefixes = share_prefixes
        self._costs = None
        if costs is not None and costs.any():
            self._costs = _whole_numbers(costs)
        self._reader = picture_reader(rows)
        self._token_budget = plan.micro_batch_tokens if padding_free else None
        self._sequences = plan.per_device_train_batch_size if padding_free else 1
        self._lengths = rows.lengths

        # Of two epochs and two steps: with images, the share of the next step is asked for ahead.
        self._order = lru_cache(maxsize=2)(self._epoch_order)
        self._share = lru_cache(maxsize=2)(self._split)

        # Bounds of the steps in an epoch's order, if the config gives the batch in tokens rather than in rows.
        self._boundaries = None
        self.steps_per_epoch = -(-rows_per_epoch(rows) // plan.global_batch_size)
        if plan.global_batch_tokens is not None:
            self._boundaries = lru_cache(maxsize=2)(self._epoch_boundaries)
            self.steps_per_epoch = plan.steps_per_epoch

    def _epoch_order(self, epoch: int) -> Ids:
        return epoch_order(self._seed, epoch, self._rows.source, self._rows.weights)

    def _epoch_boundaries(self, epoch: int) -> Ids:
        return step_boundaries(self._lengths[self._order(epoch)], self.steps_per_epoch)

    def samples(self, step: int) -> Ids:
        """Return the row ids of a step's global batch, the same on every rank and at every world size."""
        # Step 7 of epochs of 3 steps is step 1 of epoch 2. So a resumed run needs nothing but the number.
        epoch, index = divmod(step, self.steps_per_epoch)
        if self._boundaries is not None:
            first, end = self._boundaries(epoch)[index : index + 2]
            return self._order(epoch)[first:end]
        return global_batch(self._order(epoch), index, self._plan.global_batch_size)

    def step(self, step: int) -> Work:
        """Return this rank's micro-batches of a step."""
        ids = self.samples(step)
        share, computed = self._share(step)
        batches = []
        for micro_ids in share:
            batch = batch_of(
                self._rows, micro_ids, self._reader, share_prefixes=self.share_prefixes
            )
            batches.append(batch)

        # Threads read the images of the next step while this one is trained.
        if self._reader is not None:
            next_share, _ = self._share(step + 1)
            for micro_ids in next_share:
                for row in micro_ids:
                    self._reader.look_ahead(self._rows.images(int(row)))

        labels = int(self._rows.trained_counts[ids].sum())
        return Work(
            batches,
            divisor=labels,
            labels=labels,
            tokens=int(self._lengths[ids].sum()),
            samples=len(ids),
            computed=computed,
        )

    def step_tokens(self, step: int) -> tuple[int, int]:
        """Return how many tokens of a step go through the model, and how many it has."""
        _, computed = self._share(step)
        return computed, int(self._lengths[self.samples(step)].sum())

    def largest(self) -> Batch:
        """Return a micro-batch about as large as the run's largest, made of the longest rows, to measure memory with."""
        # A rank never gets more rows of a step than its even share.
        most = -(-self._plan.global_batch_size // self._world.size)
        if self._boundaries is not None:
            most = len(self._lengths)  # a batch given in tokens has any number of rows
        if self._token_budget is None:
            longest_first = np.argsort(-self._lengths, kind="stable")
            ids = longest_first[: min(most, self._sequences)]
        else:
            ids = fill(self._lengths, self._token_budget, most)
        return batch_of(self._rows, ids, self._reader)

    def _split(self, step: int) -> tuple[list[Ids], int]:
        """Return the row ids of this rank's micro-batches, and how many tokens all ranks compute."""
        ids = self.samples(step)
        size = self._world.size
        if self.share_prefixes and self._token_budget is not None:
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
        if self._even:
            split = evened(split)
        return split[self._world.rank], computed


def _whole_numbers(costs: NDArray[np.float64]) -> Ids:
    """Return costs as whole numbers, about a million in the mean.

    Sums of floats depend on the order in which they are added, so ranks might deal the rows differently.
    """
    scaled: Ids = np.rint(costs * (2**20 / costs.mean())).astype(np.int64)
    return scaled


def rows_per_epoch(rows: Rows) -> int:
    """Return the number of samples of an epoch: every row of every source, as often as its weight says."""
    return epoch_size(_rows_per_source(rows), rows.weights)


def _rows_per_source(rows: Rows) -> list[int]:
    counts: list[int] = np.bincount(rows.source, minlength=len(rows.weights)).tolist()
    return counts


def tokens_per_epoch(rows: Rows) -> int:
    """Return the tokens of an epoch. A source that is used in part counts with rows of its mean length."""
    tokens = np.bincount(rows.source, weights=rows.lengths, minlength=len(rows.weights))
    total = 0
    for source, count in enumerate(_rows_per_source(rows)):
        if count:
            samples = epoch_size([count], [rows.weights[source]])
            total += int(tokens[source] * samples) // count
    return total


def evaluated(rows: Rows) -> Ids:
    """Return the rows that an evaluation uses: all, or of each source a part if their weights differ."""
    parts = []
    for source, number in enumerate(evaluated_rows(_rows_per_source(rows), rows.weights)):
        ids = np.flatnonzero(rows.source == source).astype(np.int64)
        parts.append(shuffled(ids, "evaluated")[:number])  # the same at each evaluation
    if not parts:
        return NOTHING
    return np.sort(np.concatenate(parts))


def evaluation_batches(
    rows: Rows, plan: Plan, world: World, *, padding_free: bool = True, even: bool = False
) -> list[list[Ids]]:
    """Return every row of `evaluated` once, `[rank][batch]` -> row ids.

    A batch holds at most training's budget of tokens. Which rows are in one batch does not depend on the number of
    ranks, so that no bit of the results does. `even`: give every rank equally many batches, some of them empty.
    """
    batches = groups(rows, plan, evaluated(rows), padding_free=padding_free)
    split = deal(batches, rows.lengths, world.size)
    if even:
        split = evened(split)
    return split


def groups(rows: Rows, plan: Plan, ids: Ids, *, padding_free: bool) -> list[Ids]:
    """Return batches of row ids for a forward pass without training, the same for any number of ranks."""
    if padding_free and plan.micro_batch_tokens is not None:
        # Small enough that many ranks get a batch, even if the budget would hold all rows.
        share = -(-int(rows.lengths[ids].sum()) // EVALUATION_BATCHES)
        budget = min(plan.micro_batch_tokens, max(share, SMALLEST_BATCH_TOKENS))
        return pack(ids, rows.lengths, budget)
    # In rows: like lengths together, so that little is padded.
    size = plan.per_device_eval_batch_size if padding_free else 1
    by_length = ids[np.argsort(-rows.lengths[ids], kind="stable")]
    return [by_length[start : start + size] for start in range(0, len(ids), size)]


def evened(split: list[list[Ids]]) -> list[list[Ids]]:
    """Give every rank as many micro-batches as the one with the most, by adding empty ones."""
    most = max(len(share) for share in split)
    evened_split = []
    for share in split:
        missing = most - len(share)
        evened_split.append(share + [NOTHING] * missing)
    return evened_split


def batch_of(
    rows: Rows, ids: Ids, reader: PictureReader | None, *, share_prefixes: bool = False
) -> Batch:
    """Return rows as one batch of tensors.

    `reader`: what `picture_reader(rows)` returned, the same for all batches. `share_prefixes`: see `Feed`.
    """
    if not len(ids):
        batch = empty_batch(rows.sequences_per_row, reader)
        if rows.is_labelled and rows.targets is not None:
            # Labels of no row are as wide as those of the others.
            batch = replace(batch, labels=torch.from_numpy(rows.targets[ids].astype(np.float32)))
        return batch
    samples = [int(row) for row in ids]

    # A classifier's rows.
    if rows.is_labelled and rows.targets is not None:
        texts = [rows.row(row)[0] for row in samples]
        segments = [rows.segments(row) for row in samples]
        return collate_labelled(texts, segments, rows.targets[ids], samples)

    # All others: one sequence of a row, or two of a pair.
    sequences: list[TrainedIds] = []
    for row in samples:
        sequences += rows.sequences(row)
    if reader is not None:
        pictures = [reader.read(rows.images(row)) for row in samples]
        batch = collate_pictured(sequences, pictures, reader.processor, samples)
    elif share_prefixes:
        batch = collate_shared(sequences, samples)
    else:
        batch = collate(sequences, samples)

    if rows.targets is not None:
        batch = replace(batch, targets=torch.from_numpy(rows.targets[ids]))
    if rows.reference is not None:
        batch = replace(batch, reference=torch.from_numpy(rows.reference[ids]))
    if rows.teacher is not None:
        numbers = rows.teacher[rows.label_places(ids)]
        batch = replace(batch, teacher=torch.from_numpy(numbers))
    return batch


def empty_batch(sequences: int, reader: PictureReader | None) -> Batch:
    """Return a batch that goes through the whole model and adds nothing: one token in each sequence, and no label."""
    nothing = [(np.zeros(1, np.uint32), np.zeros(1, bool))] * sequences
    if reader is None:
        return collate(nothing)
    return collate_pictured(nothing, [[]], reader.processor)
