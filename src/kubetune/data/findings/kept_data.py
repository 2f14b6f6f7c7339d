"""Describe prepared data in numbers and facts: for data.json in the run directory, and for pages."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune.base import files
from kubetune.data.findings import kept_conversations
from kubetune.data.findings.checked import findings_of
from kubetune.data.length_bars import bars
from kubetune.data.prepared import data_facts, kept_rows
from kubetune.rundir.metrics import DATA

if TYPE_CHECKING:
    from kubetune.data.prepared.prepare import Prepared


def describe(prepared: Prepared) -> dict[str, Any]:
    """Return what data.json holds.

    fingerprint  of the prepared data
    splits       of each split its counts, and `lengths`: `[shortest, longest, rows]` of each bar of a histogram. Bars of
                 all splits have the same width
    findings     what a person should know about the data
    facts        what the result needs: data_facts.DataFacts, labels, SHA-256 of the chat template, what decides images
    """
    # Counts come from stats.json, lengths from the rows themselves.
    rows = {
        "train": prepared.train,
        "eval": prepared.eval,
        "forget": prepared.forget,
    }
    lengths = {}
    for split, of_split in rows.items():
        if of_split is not None:
            lengths[split] = of_split.lengths.tolist()
    longest = max((max(of_split, default=0) for of_split in lengths.values()), default=0)
    splits = {}
    for split, stats in prepared.stats.items():
        if split in lengths:
            splits[split] = {**stats, "lengths": bars(lengths[split], longest=longest)}

    # What somebody needs who has only the result: how to ask it, and whether an image or a template is another.
    facts = asdict(data_facts.of_prepared(prepared.path))
    facts["labels"] = None
    if prepared.labels is not None:
        facts["labels"] = asdict(prepared.labels)
    # A digest tells whether a template is another; the text itself is with the tokenizer.
    facts["chat_template"] = None
    template = prepared.tokenizer.chat
    if template is not None:
        facts["chat_template"] = hashlib.sha256(template.source.encode()).hexdigest()

    facts["images"] = None
    processor = prepared.train.processor
    if processor is not None and prepared.spec.vision is not None:
        facts["images"] = {
            "max_tokens": prepared.spec.vision.image_max_tokens,
            "fingerprint": processor.fingerprint,
        }

    return {
        "fingerprint": prepared.fingerprint,
        "splits": splits,
        "findings": [finding.to_json() for finding in findings_of(prepared)],
        "facts": facts,
    }


def record(
    run_dir: Path,
    prepared: Prepared,
) -> None:
    """Write into the run directory what its result needs from the data: data.json, rows and conversations.

    Raise EnvironmentFault for a full disk.
    """
    content = json.dumps(describe(prepared), indent=1)
    files.write_atomic(run_dir / DATA, content, within=run_dir)
    kept_rows.keep(run_dir, prepared)
    kept_conversations.keep(run_dir, prepared)
