"""From sources to prepared rows: tokenised once by all cores, kept under a fingerprint, whole or not at all.

Runs before any process group exists, so that nobody waits in a collective while one process tokenises.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kubetune.base import fault_injection, logs, reminders, whole_folder
from kubetune.base.files import lock, write_atomic
from kubetune.config.schema import Config, SourceConfig
from kubetune.data.prepared import data_facts
from kubetune.data.prepared.pipeline import Tally, Worker, encode_batches
from kubetune.data.prepared.row_writer import RowWriter
from kubetune.data.prepared.rows import Rows
from kubetune.data.reading.problems import Problems
from kubetune.data.reading.sources import input_digests, locate, names_of, not_read, require_sources
from kubetune.data.reading.splits import plan_batches, require_rows, split_sources, summarise
from kubetune.data.text.encode_labelled import within_positions
from kubetune.data.text.labels import Labels, find_labels, label_facts
from kubetune.data.text.tokenizer import Tokenizer, cache_folder, load_tokenizer
from kubetune.data.vision.image_processor import load_image_processor
from kubetune.rundir.starts import day_of

__all__ = ["Prepared", "Rows", "load_prepared", "prepare"]

FORMAT: Final = 4
"""Changes when the same input would give other rows, or the files another form."""

LABELS: Final = "labels.json"
MANIFEST: Final = "manifest.json"


@dataclass(frozen=True)
class Prepared:
    """Data ready for training. `stats` maps split and source to what became of its records.

    `labels` are what a classifier is to tell apart; None for language models. `forget`: rows whose loss is watched.
    """

    path: Path
    fingerprint: str
    tokenizer: Tokenizer
    train: Rows
    eval: Rows | None
    stats: dict[str, Any]
    labels: Labels | None = None
    forget: Rows | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of all."""
        return max(rows.longest for rows in (self.train, self.eval, self.forget) if rows is not None)


def prepare(config: Config, *, progress: Callable[[int], None] | None = None) -> Prepared:
    """Tokenise the data of a run, or find them already prepared.

    `progress` is called with the number of records done. Any number of processes may call this at once: one works,
    the others wait for it. Raises DataError when records are bad or too many would be left out; nothing is kept then.
    """
    cache = cache_folder(config.data.cache)
    require_sources(config)
    tokenizer = load_tokenizer(config.model, cache, date=day_of(config))
    key = fingerprint(config, tokenizer)
    folder = cache / "prepared" / key[:32]
    with lock(folder.with_suffix(".lock"), wait=True):
        if not whole_folder.is_whole(folder, MANIFEST):
            _build(folder, key, config, tokenizer, progress)
    prepared = load_prepared(folder, tokenizer, config)
    for split in split_sources(config):
        require_rows(config, split, prepared.stats[split])
    return prepared


def load_prepared(folder: Path, tokenizer: Tokenizer, config: Config) -> Prepared:
    """Open a folder that `prepare` wrote for this config."""
    manifest = json.loads((folder / MANIFEST).read_text())
    sources = split_sources(config)
    processor = load_image_processor(config, tokenizer)
    rows = {
        split: Rows(folder / split, [s.weight for s in given], processor, names_of(given))
        for split, given in sources.items()
    }
    stats: dict[str, Any] = {split: _stats(folder / split, given) for split, given in sources.items()}
    for split, given in config.sources.items():
        if given:
            stats[split]["files_not_read"] = not_read(given, images=processor is not None)
    return Prepared(
        path=folder,
        fingerprint=manifest["fingerprint"],
        tokenizer=tokenizer,
        train=rows["train"],
        eval=rows.get("eval"),
        stats=stats,
        labels=Labels.read(folder / LABELS) if (folder / LABELS).is_file() else None,
        forget=rows.get("forget"),
    )


def _stats(folder: Path, sources: Sequence[SourceConfig]) -> dict[str, Any]:
    """Counts of a split's records by what became of them, each source under the path that this run names it by.

    Rows are found by what is in their files, which may have lain elsewhere when they were prepared.
    """
    stats: dict[str, Any] = json.loads((folder / "stats.json").read_text())
    for found, source in zip(stats["sources"], sources, strict=True):
        found["path"] = source.path
    return stats


def fingerprint(config: Config, tokenizer: Tokenizer) -> str:
    """SHA-256 of all that decides the prepared rows: bytes of the inputs, tokenizer, template and settings.

    The sources' weights are not among it: they decide how often a row is used, not what it is.
    """
    data = config.data
    sources = {split: given for split, given in config.sources.items() if given or split != "forget"}
    seeded = isinstance(data.eval, float) or any(
        source.range or locate(source).sample for given in sources.values() for source in given
    )
    facts: dict[str, Any] = {
        "format": FORMAT,
        "task": config.task,
        "tokenizer": tokenizer.fingerprint,
        "settings": data.model_dump(include={"max_length", "overlong", "train_on", "add_special_tokens"}),
        "share": data.eval if isinstance(data.eval, float) else None,
        "seed": config.training.seed if seeded else None,
        "sources": {split: [_source_facts(source) for source in given] for split, given in sources.items()},
    }
    if config.task == "preference":
        facts["records"] = config.record_kind  # by which losses share their rows
    if config.record_kind in ("pair", "graded"):
        facts["unusable_pairs"] = data.unusable_pairs
    if config.task == "sequence_classification":
        facts["labels"] = label_facts(config)
    if (processor := load_image_processor(config, tokenizer)) is not None:
        facts["images"] = processor.fingerprint
        # Rows hold where their images lie, and that is seen from the data.
        facts["folders"] = [os.path.abspath(locate(s).path) for given in sources.values() for s in given]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _source_facts(source: SourceConfig) -> dict[str, Any]:
    facts = source.model_dump(include={"format", "columns", "subset", "split", "range"})
    return facts | {"sample": locate(source).sample, "inputs": input_digests(source)}


def _build(
    folder: Path, key: str, config: Config, tokenizer: Tokenizer, progress: Callable[[int], None] | None
) -> None:
    """Write the rows, the manifest last. The lock is held, so nobody is working on what killed runs left."""
    whole_folder.remove_leftovers(folder.parent, folder.name)
    whole_folder.remove(folder)
    with whole_folder.written(folder, "prepare") as partial:
        _write_rows(partial, config, tokenizer, progress)
        manifest = {"format": FORMAT, "fingerprint": key, "files": whole_folder.checksums(partial)}
        write_atomic(partial / MANIFEST, json.dumps(manifest, indent=1))


def _write_rows(folder: Path, config: Config, tokenizer: Tokenizer, progress: Callable[[int], None] | None) -> None:
    sources = split_sources(config)
    tallies = {split: [Tally() for _ in given] for split, given in sources.items()}
    problems = Problems()
    labels = find_labels(config)
    if labels is not None:
        config = within_positions(config, tokenizer)
    processor = load_image_processor(config, tokenizer)
    worker = Worker(tokenizer, config.data, sources, labels, processor, kind=config.record_kind)
    done = 0
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(RowWriter(folder / split, config.record_kind, pictured=processor is not None))
            for split in sources
        }
        stack.enter_context(
            reminders.reminding(lambda taken: logs.DATA.info("%s records prepared in %s", f"{done:,}", taken))
        )
        results = encode_batches(worker, plan_batches(config, problems, tallies), problems, config.data.num_proc)
        for result in stack.enter_context(closing(results)):
            writers[result.split].write(result.source, result.chunk)
            tallies[result.split][result.source].add(result.tally)
            done += result.tally.records
            fault_injection.reach("prepare")
            if progress:
                progress(done)
    problems.raise_if_any()
    data_facts.write(folder, config)
    if labels is not None:
        labels.write(folder / LABELS)
    for split, given in tallies.items():
        stats = summarise(sources[split], given)
        require_rows(config, split, stats)
        write_atomic(folder / split / "stats.json", json.dumps(stats, indent=1))
