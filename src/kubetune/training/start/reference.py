"""Compute the log-probabilities of all answers under the reference, once, before the first step, on all ranks.

The reference is the model before training: the base with its adapter off, or the frozen start. The results lie beside
the prepared data, where every run on the same data and the same base finds them:

    DATA.reference-3c4d.npz       train [rows, 2], eval [rows, 2]; written when all is done
    DATA.reference-3c4d.parts/    until then: one file for each part that is done
        5e6f.npz                        train.ids [2, 0, 5], train [3, 2]: the results of rows 2, 0 and 5

The work is cut into units, which are rows that are run together. They follow from the rows and the plan, not from the
ranks, so a later start on any number of ranks does exactly the units that no part has. Two ranks, parts of 4 units:

    part 0    rank 0: units 0 2    rank 1: units 1 3    all ranks gather, one rank of each node writes its file
    part 1    rank 0: units 4 6    rank 1: unit  5      rank 1 runs an empty unit if the model is sharded
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import time
import uuid
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
import transformers

from kubetune import errors
from kubetune.base import files, logs, whole_folder
from kubetune.batching.feed import batch_of, groups
from kubetune.batching.image_batches import picture_reader
from kubetune.data.order import Ids
from kubetune.data.prepared import identity
from kubetune.distributed import process_group
from kubetune.models import fsdp
from kubetune.models.loading import load_pretrained
from kubetune.models.padding_free import implementation
from kubetune.rundir import heartbeat, metrics
from kubetune.tasks import causal_lm, preference, vision_language

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kubetune.data.prepared.prepare import Prepared
    from kubetune.data.prepared.rows import Rows
    from kubetune.distributed.process_group import World
    from kubetune.models.learner import Learner
    from kubetune.models.spec import ModelSpec
    from kubetune.plan.plan import Plan
    from kubetune.training.start.rank_start import RankStart

    # Split -> log-probabilities of the two answers of each row, [rows, 2]; NaN for those still unknown.
    Tables = dict[str, NDArray[np.float64]]

# Raise it when the same rows would give other numbers, or when the form of the files changes.
FORMAT: Final = 1

# Number of parts in which the work is written; a kill loses at most one of them.
PARTS: Final = 128


class Unit(NamedTuple):
    """Rows that are run together."""

    split: str
    ids: Ids  # [rows]


class Answer(NamedTuple):
    """The result of a unit."""

    split: str
    ids: Ids  # [rows]
    values: NDArray[np.float64]  # [rows, 2] log-probabilities of both answers


def attach(start: RankStart, learner: Learner, dtype: torch.dtype, *, share_prefixes: bool) -> None:
    """Set `reference` of the rows of a run. All ranks call it, with the model as it is before training.

    `share_prefixes`: compute prefixes that rows share once. Raise ModelError if a log-probability is not finite.
    """
    data = start.data
    world = start.world
    splits = {"train": data.train}
    if data.eval is not None:
        splits["eval"] = data.eval

    # All ranks agree on the name of the file, and on whether it has to be computed: nodes need not share a disk.
    key = None
    if world.is_main:
        assert start.base is not None, "rank 0 has it"
        key = _fingerprint(learner, dtype, data, start.base, share_prefixes)
    key = process_group.broadcast(key, world)

    # Beside the prepared rows, which many runs share.
    path = data.path.with_name(f"{data.path.name}.reference-{key[:32]}.npz")
    parts = path.with_suffix(".parts")
    began = time.perf_counter()
    tables = _read(path, splits)
    is_missing = process_group.agree(tables is None, world)
    # If one rank lacks them, all compute: the model may be sharded.
    if is_missing or tables is None:
        tables = scores(learner, splits, start.plan, world, parts, share_prefixes=share_prefixes)
        # One rank of each node writes: nodes may share a disk or not.
        if world.local_rank == 0:
            _write(path, tables)
            whole_folder.remove(parts)
    for split, rows in splits.items():
        rows.reference = tables[split]

    if not world.is_main:
        return

    seconds = time.perf_counter() - began
    num_rows = sum(len(rows) for rows in splits.values())
    source = "found"
    if is_missing:
        source = f"computed in {seconds:.1f} s"
    logs.MODEL.info(
        "log-probabilities of %s rows under the model before training: %s", f"{num_rows:,}", source
    )
    metrics.record_event(
        start.run_dir, "reference", rows=num_rows, reused=not is_missing, seconds=seconds
    )


def ask_base(spec: ModelSpec, learner: Learner, rows: Rows, plan: Plan, world: World) -> None:
    """Set `reference` of rows that are only evaluated, by the base of a trained model.

    If every weight was trained, the base is loaded as a second model.
    """
    if spec.lora is None:
        task = causal_lm.TASK if spec.vision is None else vision_language.TASK
        model = load_pretrained(getattr(transformers, task.auto_class), spec, world.device)
        learner = task.learner_of(model, spec)
    rows.reference = scores(learner, {"eval": rows}, plan, world)["eval"]


def _fingerprint(
    learner: Learner,
    dtype: torch.dtype,
    data: Prepared,
    base: identity.Check,
    share_prefixes: bool,
) -> str:
    """Return the SHA-256 of all that decides the log-probabilities."""
    # Another kernel or packing gives other last bits, and a run must not change them between two starts.
    weights = base.now()["model"].files
    facts: dict[str, Any] = {
        "format": FORMAT,
        "data": data.fingerprint,
        "weights": {name: content.sha256 for name, content in sorted(weights.items())},
        "dtype": str(dtype),
        "attention": [implementation(learner.lm), learner.route.padding_free, share_prefixes],
        "quantization": str(getattr(learner.lm.config, "quantization_config", None)),
    }

    # Images are no part of the rows, so their content is named beside them.
    if data.train.processor is not None:
        facts["images"] = [data.train.image_digest]
        if data.eval is not None:
            facts["images"].append(data.eval.image_digest)

    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def scores(
    learner: Learner,
    splits: Mapping[str, Rows],
    plan: Plan,
    world: World,
    parts: Path | None = None,
    *,
    share_prefixes: bool = False,
) -> Tables:
    """Return the tables of the model with its adapter off, for the rows of some splits.

    `parts`: the folder in which finished work is kept. Raise ModelError if a log-probability is not finite.
    """
    # What earlier starts have done.
    tables = {}
    for split, rows in splits.items():
        tables[split] = np.full((len(rows), 2), np.nan)
    if parts is not None:
        for part in sorted(parts.glob("*.npz")):
            _take_up(part, tables)

    units = []
    for split, rows in splits.items():
        everything = np.arange(len(rows))
        for ids in groups(rows, plan, everything, padding_free=learner.route.padding_free):
            units.append(Unit(split, ids))

    missing = _missing(units, tables, world)
    if len(missing) < len(units) and world.is_main:
        percent = 100 * (len(units) - len(missing)) // len(units)
        logs.MODEL.info("%d %% of the reference's part was done before", percent)

    # All ranks have equally many units of a part, except of the last one.
    units_of_rank = max(1, math.ceil(len(missing) / (PARTS * world.size)))
    size = units_of_rank * world.size

    learner.model.eval()
    try:
        for start in range(0, len(missing), size):
            answers = _answers(
                learner,
                splits,
                missing[start : start + size],
                world,
                share_prefixes,
            )
            for answer in answers:
                _require_finite(answer)
                tables[answer.split][answer.ids] = answer.values
            if parts is not None and world.local_rank == 0:
                _write_part(parts, answers)
    finally:
        fsdp.close(learner.lm)
        learner.model.train()

    return tables


def _missing(units: Sequence[Unit], tables: Tables, world: World) -> list[Unit]:
    """Return the units that are missing on at least one rank: nodes need not share a disk."""
    has_unit = []
    for unit in units:
        values = tables[unit.split][unit.ids]
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
    learner: Learner,
    splits: Mapping[str, Rows],
    units: Sequence[Unit],
    world: World,
    share_prefixes: bool,
) -> list[Answer]:
    """Run some units, which are dealt to the ranks in turn. Return the results of all, the same on all ranks."""
    mine = list(units[world.rank :: world.size])
    if fsdp.is_sharded(learner.model):
        # All ranks take part in each forward, so a rank without a unit runs one of no rows.
        most = math.ceil(len(units) / world.size)
        empty = Unit(next(iter(splits)), np.empty(0, np.int64))
        mine += [empty] * (most - len(mine))

    readers = {split: picture_reader(rows) for split, rows in splits.items()}
    answers = []
    for unit in mine:
        heartbeat.beat("reference")
        batch = batch_of(
            splits[unit.split],
            unit.ids,
            readers[unit.split],
            share_prefixes=share_prefixes,
        )
        values = preference.log_probabilities(learner, batch.to(world.device))
        answers.append(Answer(unit.split, unit.ids, values))

    of_all = []
    for of_rank in process_group.gather(answers, world):
        of_all.extend(of_rank)
    return of_all


def _require_finite(answer: Answer) -> None:
    """Raise ModelError, naming the first row, if a log-probability is not finite."""
    is_finite = np.isfinite(answer.values).all(1)
    if is_finite.all():
        return
    first = int(np.argmin(is_finite))
    raise errors.ModelError(
        f"the model says {answer.values[first].tolist()} of the answers of {answer.split} row "
        f"{int(answer.ids[first]):,}, before any training; expected log-probabilities. Its weights may be damaged, or "
        "model.dtype too narrow"
    )


def _write_part(parts: Path, answers: Sequence[Answer]) -> None:
    """Write the file of a part, in the form that the top of this module shows."""
    # Units of no rows were only there to keep ranks together.
    by_split: dict[str, list[Answer]] = {}
    for answer in answers:
        if len(answer.ids):
            by_split.setdefault(answer.split, []).append(answer)

    arrays: dict[str, NDArray[Any]] = {}
    for split, of_split in by_split.items():
        arrays[f"{split}.ids"] = np.concatenate([answer.ids for answer in of_split])
        arrays[split] = np.concatenate([answer.values for answer in of_split])
    _write(parts / f"{uuid.uuid4().hex}.npz", arrays)


def _write(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    files.write_atomic(path, content.getvalue())


def _load(path: Path) -> Tables:
    """Return the arrays of a file; none if it does not exist or is damaged."""
    try:
        # Without pickle, so a file cannot run code.
        with np.load(path) as arrays:
            return dict(arrays)
    except (OSError, ValueError, zipfile.BadZipFile, EOFError):
        return {}


def _read(path: Path, splits: Mapping[str, Rows]) -> Tables | None:
    """Return the tables in a file, None if one is missing or incomplete."""
    tables = _load(path)
    # Other shapes are those of other data, or of a file that is cut off.
    shapes = {split: table.shape for split, table in tables.items()}
    expected = {split: (len(rows), 2) for split, rows in splits.items()}
    if shapes != expected:
        return None
    return tables


def _take_up(part: Path, tables: Tables) -> None:
    """Copy the rows of a part into the tables."""
    arrays = _load(part)
    for split, table in tables.items():
        # A part may hold rows of one split alone.
        if split in arrays:
            table[arrays[f"{split}.ids"]] = arrays[split]
