"""Identify prepared rows by all that decides them, and read the counts kept beside them. No numpy, for `kubetune plan`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Final

from kubetune.config.schema import SourceConfig
from kubetune.data.reading.sources import input_digests, locate, not_read
from kubetune.data.reading.strict_json import JsonObject
from kubetune.data.spec import DataSpec, Split
from kubetune.data.text.find_labels import label_facts
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.data.vision.image_processor import processor_of

# Changes when the same input would give other rows, or the files another form.
FORMAT: Final = 11

MANIFEST: Final = "manifest.json"


def kept_stats(folder: Path, spec: DataSpec) -> dict[Split, JsonObject]:
    """Return the counts that a folder of prepared rows keeps, by split."""
    stats = {}
    for split, sources in spec.splits.items():
        stats[split] = _stats(folder / split, sources)
    return with_files_not_read(spec.sources, stats, images=spec.vision is not None)


def with_files_not_read(
    sources: Mapping[Split, Sequence[SourceConfig]],
    stats: Mapping[Split, JsonObject],
    *,
    images: bool,
) -> dict[Split, JsonObject]:
    """Return the counts with those of files in folders of data that are not read, as they lie there now."""
    with_files = dict(stats)
    for split, of_split in sources.items():
        if of_split:
            left = not_read(of_split, images=images)
            with_files[split] = {**with_files[split], "files_not_read": left}

    return with_files


def _stats(folder: Path, sources: Sequence[SourceConfig]) -> JsonObject:
    """Return counts of a split's records by what became of them, with the sources' paths in this run's config.

    The same files may have had other paths when the rows were prepared: only their content is in the fingerprint.
    """
    stats: JsonObject = json.loads((folder / "stats.json").read_text())
    for counts, source in zip(stats["sources"], sources, strict=True):
        counts["path"] = source.path
    return stats


def fingerprint(spec: DataSpec, tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of all that decides the prepared rows: bytes of the inputs, tokenizer, template and settings.

    The sources' weights are left out: they decide how often a row is used, not what it is.
    """
    data = spec.data
    splits = dict(spec.sources)
    if not splits["forget"]:
        del splits["forget"]
    sources = list(chain(*splits.values()))

    # The seed decides rows only where some are drawn: a part of a source, or the share to evaluate on.
    eval_share = data.eval if isinstance(data.eval, float) else None
    takes_part = any(source.range or locate(source).sample for source in sources)
    seed = spec.seed if takes_part or eval_share is not None else None

    settings = data.model_dump(include={"max_length", "overlong", "train_on", "add_special_tokens"})

    # Columns and formats decide rows as much as the bytes of files do.
    source_facts = {}
    for split, of_split in splits.items():
        source_facts[split] = [_source_facts(source) for source in of_split]
    facts: JsonObject = {
        "format": FORMAT,
        "task": spec.task,
        "tokenizer": tokenizer.fingerprint,
        "settings": settings,
        "share": eval_share,
        "seed": seed,
        "sources": source_facts,
    }

    # Further settings decide rows of some kinds only, so others keep their fingerprint when those change.
    # Losses share the rows of a kind, but a distillation that draws its answers needs none in the data.
    if spec.task in ("preference", "distill"):
        facts["records"] = spec.record_kind
    if spec.record_kind in ("pair", "graded"):
        facts["unusable_pairs"] = data.unusable_pairs
    if spec.task == "sequence_classification":
        facts["labels"] = label_facts(spec.classification, spec.model)

    processor = processor_of(spec, tokenizer)
    if processor is not None:
        facts["images"] = processor.fingerprint
        # Rows hold absolute paths of images, so the same data in another folder make other rows.
        facts["folders"] = [os.path.abspath(locate(source).path) for source in sources]

    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _source_facts(source: SourceConfig) -> JsonObject:
    facts = source.model_dump(include={"format", "columns", "subset", "split", "range"})
    return facts | {"sample": locate(source).sample, "inputs": input_digests(source)}
