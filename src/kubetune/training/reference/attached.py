"""Give the rows of a run their reference, once, before the first step.

The reference is the model before training: the base with its adapter off, or the frozen start.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from kubetune.base import logs, whole_folder
from kubetune.data.prepared import identity
from kubetune.data.prepared.prepare import Prepared
from kubetune.data.prepared.rows import Rows
from kubetune.distributed import process_group
from kubetune.models.learner import Learner
from kubetune.models.padding_free import implementation
from kubetune.rundir import metrics
from kubetune.training.reference.logp_tables import Tables, read_tables, write_tables
from kubetune.training.reference.scores import Asked, AskedForAnswers, scores
from kubetune.training.start.rank_start import RankStart

# Raise it when the same rows would give other numbers, or when the form of the files changes.
FORMAT: Final = 1


def attach(start: RankStart, learner: Learner, dtype: torch.dtype, *, share_prefixes: bool) -> None:
    """Set `reference` of the rows of a run. All ranks call it, with the model as it is before training.

    `share_prefixes`: compute prefixes that rows share once. Raise ModelError if a log-probability is not finite.
    """
    data = start.data
    splits = {"train": data.train}
    if data.eval is not None:
        splits["eval"] = data.eval
    key = None
    if start.world.is_main:
        assert start.base is not None, "rank 0 has it"
        key = _fingerprint(learner, dtype, data, start.base, share_prefixes)
    place = KeptNumbers(start, "reference", key, "the model before training")
    asked = AskedForAnswers()
    tables = tables_of(
        place, splits, asked, partial(scores, asked, learner, share_prefixes=share_prefixes)
    )
    for split, rows in splits.items():
        rows.reference = tables[split]


@dataclass(frozen=True)
class KeptNumbers:
    """Where a run keeps what a model says of its rows."""

    start: RankStart
    kind: str  # of the file, and of the event that says how it was come by
    key: str | None  # on rank 0: the digest of all that decides the numbers
    whose: str  # model, for the log


def tables_of(
    place: KeptNumbers, splits: Mapping[str, Rows], asked: Asked, ask: Callable[..., Tables]
) -> Tables:
    """Return what a model says of the rows of some splits, computed once for all runs. All ranks call it.

    `ask`: `scores` of what is asked, by the model that is asked if the file is missing.
    """
    start = place.start
    data = start.data
    world = start.world
    # All ranks agree on the name of the file, and on whether it has to be computed: nodes need not share a disk.
    key: str = process_group.broadcast(place.key, world)

    # Beside the prepared rows, which many runs share.
    path = data.path.with_name(f"{data.path.name}.{place.kind}-{key[:32]}.npz")
    parts = path.with_suffix(".parts")
    began = time.perf_counter()
    tables = read_tables(path, {split: asked.shape(rows) for split, rows in splits.items()})
    is_missing = process_group.agree(tables is None, world)
    # If one rank lacks them, all compute: the model may be sharded.
    if is_missing or tables is None:
        tables = ask(splits, start.plan, world, parts)
        # One rank of each node writes: nodes may share a disk or not.
        if world.local_rank == 0:
            write_tables(path, tables)
            whole_folder.remove(parts)

    if world.is_main:
        seconds = time.perf_counter() - began
        num_rows = sum(len(rows) for rows in splits.values())
        source = "found"
        if is_missing:
            source = f"computed in {seconds:.1f} s"
        logs.MODEL.info(
            "log-probabilities of %s rows under %s: %s", f"{num_rows:,}", place.whose, source
        )
        metrics.record_event(
            start.run_dir, place.kind, rows=num_rows, reused=not is_missing, seconds=seconds
        )
    return tables


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
