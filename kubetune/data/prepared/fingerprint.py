"""The folder that rows of a config are kept in, and the counts that lie there. Imports no numpy, for `kubetune plan`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

from kubetune.config.schema import SourceConfig
from kubetune.data.findings.data_pass import with_files_not_read
from kubetune.data.prepared.pipeline import Split
from kubetune.data.reading.sources import input_digests, locate
from kubetune.data.spec import DataSpec
from kubetune.data.text.find_labels import label_facts
from kubetune.data.text.tokenizer import Tokenizer

FORMAT: Final = 7
"""Changes when the same input would give other rows, or the files another form."""

MANIFEST: Final = "manifest.json"


def kept_stats(folder: Path, spec: DataSpec) -> dict[Split, dict[str, Any]]:
    """Return the counts that a folder of prepared rows keeps, by split."""
    stats = {}
    for split, sources in spec.splits.items():
        stats[split] = _stats(folder / split, sources)
    return with_files_not_read(spec.sources, stats, images=spec.vision is not None)


def _stats(folder: Path, sources: Sequence[SourceConfig]) -> dict[str, Any]:
    """Return counts of a split's records by what became of them, each source under the path that this run names it by.

    Rows are found by what is in their files, which may have lain elsewhere when they were prepared.
    """
    stats: dict[str, Any] = json.loads((folder / "stats.json").read_text())
    for counts, source in zip(stats["sources"], sources, strict=True):
        counts["path"] = source.path
    return stats


def fingerprint(spec: DataSpec, tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of all that decides the prepared rows: bytes of the inputs, tokenizer, template and settings.

    The sources' weights are not among it: they decide how often a row is used, not what it is.
    """
    data = spec.data
    splits = dict(spec.sources)
    if not splits["forget"]:
        del splits["forget"]
    sources = list(chain(*splits.values()))
    takes_part = any(source.range or locate(source).sample for source in sources)
    seeded = takes_part or isinstance(data.eval, float)
    facts: dict[str, Any] = {
        "format": FORMAT,
        "task": spec.task,
        "tokenizer": tokenizer.fingerprint,
        "settings": data.model_dump(
            include={"max_length", "overlong", "train_on", "add_special_tokens"}
        ),
        "share": data.eval if isinstance(data.eval, float) else None,
        "seed": spec.seed if seeded else None,
        "sources": {
            split: list(map(_source_facts, of_split)) for split, of_split in splits.items()
        },
    }
    if spec.task == "preference":
        facts["records"] = spec.record_kind  # by which losses share their rows
    if spec.record_kind in ("pair", "graded"):
        facts["unusable_pairs"] = data.unusable_pairs
    if spec.task == "sequence_classification":
        facts["labels"] = label_facts(spec.classification, spec.model)
    processor = spec.image_processor(tokenizer)
    if processor is not None:
        facts["images"] = processor.fingerprint
        # Rows hold where their images lie, and that is seen from the data.
        facts["folders"] = [os.path.abspath(locate(source).path) for source in sources]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _source_facts(source: SourceConfig) -> dict[str, Any]:
    facts = source.model_dump(include={"format", "columns", "subset", "split", "range"})
    return facts | {"sample": locate(source).sample, "inputs": input_digests(source)}
