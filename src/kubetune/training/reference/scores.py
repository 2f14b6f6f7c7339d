"""Ask a model about all rows, on all ranks: the one that learns with its adapter off, or a teacher.

The work is cut into units, which are rows that are run together. They follow from the rows and the plan, not from the
ranks, so a later start on any number of ranks does exactly the units that no part has. Two ranks, parts of 4 units:

    part 0    rank 0: units 0 2    rank 1: units 1 3    all ranks gather, one rank of each node writes its file
    part 1    rank 0: units 4 6    rank 1: unit  5      rank 1 runs an empty unit if the model is sharded
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kubetune import errors
from kubetune.base import logs
from kubetune.batching.feed import batch_of, groups
from kubetune.batching.image_batches import picture_reader
from kubetune.data.order import Ids
from kubetune.data.prepared.rows import Rows
from kubetune.distributed import process_group
from kubetune.distributed.process_group import World
from kubetune.models import fsdp
from kubetune.models.learner import Learner
from kubetune.plan.plan import Plan
from kubetune.rundir import heartbeat
from kubetune.tasks import preference
from kubetune.training.reference.logp_tables import Tables, UnitAnswers, take_up, write_part

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kubetune.batching.batch import Batch

# Number of parts in which the work is written; a kill loses at most one of them.
PARTS: Final = 128

# Units that are asked for at a time, where somebody else computes them.
ASKED_AHEAD: Final = 8


class Unit(NamedTuple):
    """Rows that are run together."""

    split: str
    ids: Ids  # [rows]
    lines: Ids  # of the table: the rows, or their labels


class Asked(ABC):
    """What a model is asked about each batch, and the table that keeps the answers."""

    whose: str  # model, for messages
    dtype: Any  # of the table
    phase = "reference"  # the heartbeat's name for it

    @abstractmethod
    def of_batch(self, learner: Learner, batch: Batch) -> NDArray[Any] | Callable[[], NDArray[Any]]:
        """Return the answers `[lines, numbers]`, or what waits for them while others are asked for."""

    @abstractmethod
    def lines(self, rows: Rows, ids: Ids) -> Ids:
        """Return the lines of the table for some rows, in order."""

    @abstractmethod
    def shape(self, rows: Rows) -> tuple[int, int]:
        """Return the shape of the table."""


class AskedForAnswers(Asked):
    """The log-probabilities of the two answers of each row under the model before training."""

    whose = "the model, before any training,"
    dtype = np.float64

    def of_batch(self, learner: Learner, batch: Batch) -> NDArray[Any]:
        """Return the log-probabilities of both answers, `[rows, 2]`."""
        return preference.log_probabilities(learner, batch)

    def lines(self, rows: Rows, ids: Ids) -> Ids:
        """Return the rows themselves."""
        return ids

    def shape(self, rows: Rows) -> tuple[int, int]:
        """Return the shape of the table."""
        return (len(rows), 2)


def scores(
    asked: Asked,
    learner: Learner,
    splits: Mapping[str, Rows],
    plan: Plan,
    world: World,
    parts: Path | None = None,
    *,
    share_prefixes: bool = False,
) -> Tables:
    """Return the tables of what a model says of the rows of some splits.

    `parts`: the folder in which finished work is kept. Raise ModelError if a log-probability is not finite.
    """
    # What earlier starts have done.
    tables = {}
    for split, rows in splits.items():
        tables[split] = np.full(asked.shape(rows), np.nan, asked.dtype)
    if parts is not None:
        for part in sorted(parts.glob("*.npz")):
            take_up(part, tables)

    units = []
    for split, rows in splits.items():
        everything = np.arange(len(rows))
        for ids in groups(rows, plan, everything, padding_free=learner.route.padding_free):
            units.append(Unit(split, ids, asked.lines(rows, ids)))

    missing = _missing(units, tables, world)
    if len(missing) < len(units) and world.is_main:
        percent = 100 * (len(units) - len(missing)) // len(units)
        logs.MODEL.info("%d %% of these rows were done before", percent)

    # All ranks have equally many units of a part, except of the last one.
    units_of_rank = max(1, math.ceil(len(missing) / (PARTS * world.size)))
    size = units_of_rank * world.size

    with learner.asked():
        for start in range(0, len(missing), size):
            answers = _answers(
                asked,
                learner,
                splits,
                missing[start : start + size],
                world,
                share_prefixes,
            )
            for of_unit in answers:
                _require_finite(of_unit, asked.whose)
                tables[of_unit.split][of_unit.lines] = of_unit.values
            if parts is not None and world.local_rank == 0:
                write_part(parts, answers)

    return tables


def _missing(units: Sequence[Unit], tables: Tables, world: World) -> list[Unit]:
    """Return the units that are missing on at least one rank: nodes need not share a disk."""
    has_unit = []
    for unit in units:
        values = tables[unit.split][unit.lines]
        has_unit.append(not np.isnan(values).any())

    # Done is what every node has.
    of_ranks = process_group.gather(np.array(has_unit, bool), world)
    everywhere = np.logical_and.reduce(of_ranks)
    missing = []
    for unit, is_done in zip(units, everywhere, strict=True):
        if not is_done:
            missing.append(unit)
    return missing


def _answers(
    asked: Asked,
    learner: Learner,
    splits: Mapping[str, Rows],
    units: Sequence[Unit],
    world: World,
    share_prefixes: bool,
) -> list[UnitAnswers]:
    """Run some units, which are dealt to the ranks in turn. Return the results of all, the same on all ranks."""
    mine = list(units[world.rank :: world.size])
    if fsdp.is_sharded(learner.model):
        # All ranks take part in each forward, so a rank without a unit runs one of no rows.
        most = math.ceil(len(units) / world.size)
        nothing = np.empty(0, np.int64)
        empty = Unit(next(iter(splits)), nothing, nothing)
        mine += [empty] * (most - len(mine))

    readers = {split: picture_reader(rows) for split, rows in splits.items()}
    answers: list[UnitAnswers] = []
    waiting: deque[tuple[Unit, Callable[[], NDArray[Any]]]] = deque()

    def wait_for_first() -> None:
        unit, wait = waiting.popleft()
        answers.append(UnitAnswers(unit.split, unit.lines, wait()))

    for unit in mine:
        heartbeat.beat(asked.phase)
        batch = batch_of(
            splits[unit.split],
            unit.ids,
            readers[unit.split],
            share_prefixes=share_prefixes,
        )
        values = asked.of_batch(learner, batch.to(world.device))
        if not callable(values):
            answers.append(UnitAnswers(unit.split, unit.lines, values))
            continue
        waiting.append((unit, values))
        if len(waiting) > ASKED_AHEAD:
            wait_for_first()
    while waiting:
        wait_for_first()

    of_all = []
    for of_rank in process_group.gather(answers, world):
        of_all.extend(of_rank)
    return of_all


def _require_finite(of_unit: UnitAnswers, whose: str) -> None:
    """Raise ModelError, naming the first line, if a log-probability is not finite."""
    is_finite = np.isfinite(of_unit.values)
    if is_finite.all():
        return
    first = int(np.argmin(is_finite.all(1)))
    wrong = of_unit.values[first][~is_finite[first]][0]
    raise errors.ModelError(
        f"{whose} says {wrong} of {of_unit.split} line {int(of_unit.lines[first]):,}; expected "
        "log-probabilities. Its weights may be damaged, or model.dtype too narrow"
    )
