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
    from kubetune.config.schema import Config
    from kubetune.data.prepared.prepare import Prepared


def describe(prepared: Prepared, config: Config) -> dict[str, Any]:
    """`fingerprint`; for each split its counts and `lengths`, `[shortest, longest, rows]` of each bar; `findings`; `facts`.

    `facts`: what data_facts.DataFacts holds; labels, SHA-256 of the chat template, and what decides images.
    """
    rows = {"train": prepared.train, "eval": prepared.eval, "forget": prepared.forget}
    splits = {
        split: {**stats, "lengths": bars(np.asarray(found.lengths).tolist())}
        for split, stats in prepared.stats.items()
        if (found := rows[split]) is not None
    }
    template, processor = prepared.tokenizer.chat, prepared.train.processor
    images = (
        {"max_tokens": config.vision.image_max_tokens, "fingerprint": processor.fingerprint}
        if processor
        else None
    )
    facts = {
        **asdict(data_facts.of_prepared(prepared.path, config.data.train[0], config.record_kind)),
        "labels": asdict(prepared.labels) if prepared.labels else None,
        "chat_template": hashlib.sha256(template.source.encode()).hexdigest() if template else None,
        "images": images,
    }
    return {
        "fingerprint": prepared.fingerprint,
        "splits": splits,
        "findings": [finding.to_json() for finding in prepared.findings],
        "facts": facts,
    }


def record(run_dir: Path, config: Config, prepared: Prepared) -> None:
    """Write into the run directory what its result needs to know of the data: data.json, and the rows that are kept.

    Raises EnvironmentFault for a full disk.
    """
    files.write_atomic(
        run_dir / DATA, json.dumps(describe(prepared, config), indent=1), within=run_dir
    )
    kept_rows.keep(run_dir, prepared)
