"""Log-probabilities of all answers under the reference, found once, before the first step, by all ranks.

The reference is the model as it is before training: the base with its adapter off, or the frozen start. What it says
lies beside the prepared data under a name of its own, whole or not there, and whoever trains on the same data from the
same base finds it. Until then parts lie beside it, which a later start goes on from, on any number of ranks: which rows
are run together depends on neither.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
import uuid
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import transformers

from kubetune import errors
from kubetune.base import files, logs, whole_folder
from kubetune.batching.feed import batch_of, groups
from kubetune.batching.image_batches import picture_reader
from kubetune.data.prepared import identity
from kubetune.data.prepared.order import Ids
from kubetune.distributed import process_group
from kubetune.models import fsdp
from kubetune.models.loading import choose_dtype, load_pretrained
from kubetune.models.padding_free import implementation
from kubetune.rundir import heartbeat, metrics
from kubetune.tasks import causal_lm, preference, vision_language

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kubetune.config.schema import Config
    from kubetune.data.prepared.prepare import Prepared
    from kubetune.data.prepared.rows import Rows
    from kubetune.distributed.process_group import World
    from kubetune.models.learner import Learner
    from kubetune.plan.plan import Plan

    Tables = dict[str, NDArray[np.float64]]
    """Of each split, log-probabilities of the two answers of each row, `[rows, 2]`; NaN where they are not known."""

    Unit = tuple[str, Ids]
    """Split and ids of rows that are run together."""

FORMAT: Final = 1
"""Changes when the same rows would give other numbers, or the files another form."""

PARTS: Final = 128
"""Number of parts that the work is kept in; a kill loses one of them."""


def attach(
    config: Config,
    plan: Plan,
    learner: Learner,
    data: Prepared,
    world: World,
    run_dir: Path,
    base: identity.Check | None,
    *,
    shares: bool,
) -> None:
    """Give the rows what the reference says of them, where the loss of the run asks it; all ranks call it.

    The model must be as it is before training. `shares`: beginnings that rows share are computed once.

    Raises ModelError where what it says is no number.
    """
    if config.task != "preference" or not config.preference.needs_reference:
        return
    splits = {
        name: rows
        for name, rows in (("train", data.train), ("eval", data.eval))
        if rows is not None
    }
    key = process_group.broadcast(
        _fingerprint(config, learner, data, world, run_dir, base, shares), world
    )
    place = data.path.with_name(f"{data.path.name}.reference-{key[:32]}.npz")
    began, tables = time.perf_counter(), _read(place, splits)
    is_found = not process_group.agree(tables is None, world)
    if not is_found or tables is None:
        tables = scores(learner, splits, plan, world, place.with_suffix(".parts"), shares=shares)
        if world.local_rank == 0:
            _write(place, tables)
            whole_folder.remove(place.with_suffix(".parts"))
    for name, rows in splits.items():
        rows.reference = tables[name]
    number, seconds = sum(map(len, splits.values())), time.perf_counter() - began
    if world.is_main:
        how = "found" if is_found else f"computed in {seconds:.1f} s"
        logs.MODEL.info(
            "log-probabilities of %s rows under the model before training: %s", f"{number:,}", how
        )
        metrics.record_event(run_dir, "reference", rows=number, found=is_found, seconds=seconds)


def ask_base(config: Config, learner: Learner, rows: Rows, plan: Plan, world: World) -> None:
    """Give rows that are only evaluated what the base of a trained model says of them, if the loss asks it.

    Where the model was trained whole, the base is loaded beside it.
    """
    if config.task == "preference" and config.preference.needs_reference:
        if config.lora is None:
            task = vision_language.TASK if config.sees else causal_lm.TASK
            model = load_pretrained(getattr(transformers, task.auto_class), config, world.device)
            learner = task.learner_of(model, config)
        rows.reference = scores(learner, {"eval": rows}, plan, world)["eval"]


def _fingerprint(
    config: Config,
    learner: Learner,
    data: Prepared,
    world: World,
    run_dir: Path,
    base: identity.Check | None,
    shares: bool,
) -> str | None:
    """SHA-256 of all that decides what the reference says; rank 0's counts, and the others have none."""
    if not world.is_main:
        return None
    weights = (base or identity.Check(config, run_dir)).now()["model"].files
    facts: dict[str, Any] = {
        "format": FORMAT,
        "data": data.fingerprint,
        "weights": {name: content.sha256 for name, content in sorted(weights.items())},
        "dtype": str(choose_dtype(config.model.dtype, world.device)),
        "attention": [implementation(learner.lm), learner.route.padding_free, shares],
        "quantization": str(getattr(learner.lm.config, "quantization_config", None)),
    }
    if config.sees:
        facts["images"] = [
            rows.image_digest for rows in (data.train, data.eval) if rows is not None
        ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def scores(
    learner: Learner,
    splits: Mapping[str, Rows],
    plan: Plan,
    world: World,
    parts: Path | None = None,
    *,
    shares: bool = False,
) -> Tables:
    """Tables of the model with its adapter off, for the rows of some splits; `parts`: a folder that keeps what is done.

    Raises ModelError where that is no number.
    """
    tables = {name: np.full((len(rows), 2), np.nan) for name, rows in splits.items()}
    for part in sorted(parts.glob("*.npz")) if parts is not None else ():
        _take_up(part, tables)
    units = [
        (name, ids)
        for name, rows in splits.items()
        for ids in groups(rows, plan, np.arange(len(rows)), padding_free=learner.route.padding_free)
    ]
    here = np.array([not np.isnan(tables[name][ids]).any() for name, ids in units], bool)
    everywhere = np.logical_and.reduce(process_group.gather(here, world))
    left = [unit for unit, is_done in zip(units, everywhere, strict=True) if not is_done]
    if len(left) < len(units) and world.is_main:
        logs.MODEL.info(
            "%d %% of the reference's part was done before",
            100 * (len(units) - len(left)) // len(units),
        )
    size = -(-len(left) // (PARTS * world.size)) * world.size or 1
    learner.model.eval()
    try:
        for start in range(0, len(left), size):
            _do_part(learner, splits, left[start : start + size], tables, world, parts, shares)
    finally:
        fsdp.close(learner.lm)
        learner.model.train()
    return tables


def _do_part(
    learner: Learner,
    splits: Mapping[str, Rows],
    units: list[Unit],
    tables: Tables,
    world: World,
    parts: Path | None,
    shares: bool,
) -> None:
    """Some units by all ranks in turn, into the tables of all, and into a file."""
    mine = units[world.rank :: world.size]
    if fsdp.is_sharded(learner.model):  # all ranks take part in each forward
        mine += [(next(iter(splits)), np.empty(0, np.int64))] * (
            -(-len(units) // world.size) - len(mine)
        )
    found, readers = [], {name: picture_reader(rows) for name, rows in splits.items()}
    for name, ids in mine:
        heartbeat.beat("reference")
        batch = batch_of(splits[name], ids, readers[name], shares=shares).to(world.device)
        said = preference.log_probabilities(learner, batch)
        found.append((name, ids, said))
    everybodys = [one for share in process_group.gather(found, world) for one in share]
    for name, ids, said in everybodys:
        if not np.isfinite(said).all():
            row = int(ids[~np.isfinite(said).all(1)][0])
            raise errors.ModelError(
                f"the model says {said[list(ids).index(row)].tolist()} of the answers of {name} row {row:,}, before "
                "any training; expected log-probabilities. Its weights may be damaged, or model.dtype too narrow"
            )
        tables[name][ids] = said
    if parts is not None and world.local_rank == 0:
        columns = {
            name: [one for one in everybodys if one[0] == name and len(one[1])] for name in tables
        }
        kept: Tables = {}
        for name, of_split in columns.items():
            if of_split:
                kept[f"{name}.ids"] = np.concatenate([ids for _, ids, _ in of_split])
                kept[name] = np.concatenate([said for *_, said in of_split])
        _write(parts / f"{uuid.uuid4().hex}.npz", kept)


def _write(path: Path, arrays: Tables) -> None:
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    files.write_atomic(path, content.getvalue())


def _load(path: Path) -> Tables:
    """The arrays of a file; none of one that is not there, or damaged."""
    try:
        with np.load(path) as found:
            return dict(found)
    except (OSError, ValueError, zipfile.BadZipFile, EOFError):
        return {}


def _read(path: Path, splits: Mapping[str, Rows]) -> Tables | None:
    """The tables in a file, if they are all there and whole."""
    tables = _load(path)
    shapes = {name: (len(rows), 2) for name, rows in splits.items()}
    return tables if {name: table.shape for name, table in tables.items()} == shapes else None


def _take_up(part: Path, tables: Tables) -> None:
    arrays = _load(part)
    for name, table in tables.items():
        if name in arrays:
            table[arrays[f"{name}.ids"]] = arrays[name]
