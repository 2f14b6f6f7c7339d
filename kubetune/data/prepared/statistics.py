"""Prepared data in numbers and facts: for data.json in the run directory, and for pages."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kubetune.base import files
from kubetune.data.prepared import data_facts, kept_rows
from kubetune.data.prepared.histogram import bars
from kubetune.rundir.metrics import DATA

if TYPE_CHECKING:
    from kubetune.data.prepared.prepare import Prepared
    from kubetune.data.spec import DataSpec


def describe(prepared: Prepared, spec: DataSpec) -> dict[str, Any]:
    """Return what data.json holds: `fingerprint`, `splits`, `findings` and `facts`.

    `splits`: of each its counts and `lengths`, `[shortest, longest, rows]` of each bar.
    `facts`: what data_facts.DataFacts holds; labels, SHA-256 of the chat template, and what decides images.
    """
    rows = {"train": prepared.train, "eval": prepared.eval, "forget": prepared.forget}
    splits = {}
    for split, stats in prepared.stats.items():
        of_split = rows[split]
        if of_split is not None:
            lengths = np.asarray(of_split.lengths).tolist()
            splits[split] = {**stats, "lengths": bars(lengths)}
    facts = asdict(data_facts.of_prepared(prepared.path, spec.data.train[0], spec.record_kind))
    facts |= {"labels": None, "chat_template": None, "images": None}
    if prepared.labels is not None:
        facts["labels"] = asdict(prepared.labels)
    template = prepared.tokenizer.chat
    if template is not None:
        facts["chat_template"] = hashlib.sha256(template.source.encode()).hexdigest()
    processor = prepared.train.processor
    if processor is not None and spec.vision is not None:
        facts["images"] = {
            "max_tokens": spec.vision.image_max_tokens,
            "fingerprint": processor.fingerprint,
        }
    return {
        "fingerprint": prepared.fingerprint,
        "splits": splits,
        "findings": [finding.to_json() for finding in prepared.findings],
        "facts": facts,
    }


def record(run_dir: Path, spec: DataSpec, prepared: Prepared) -> None:
    """Write into the run directory what its result needs to know of the data: data.json, and the rows that are kept.

    Raises EnvironmentFault for a full disk.
    """
    content = json.dumps(describe(prepared, spec), indent=1)
    files.write_atomic(run_dir / DATA, content, within=run_dir)
    kept_rows.keep(run_dir, prepared)
