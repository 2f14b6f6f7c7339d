"""Prepare rows from sources: tokenise once on all cores, and keep the rows under a fingerprint, whole or not at all.

This runs before any process group exists, so that no rank waits in a collective while one process tokenises.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kubetune.base import fault_injection, logs, reminders, whole_folder
from kubetune.base.files import explained_writes, write_atomic
from kubetune.base.humanize import size as size_of
from kubetune.base.locks import lock
from kubetune.config.schema import Config
from kubetune.data.prepared import data_facts
from kubetune.data.prepared.data_pass import DataPass
from kubetune.data.prepared.fingerprint import FORMAT, MANIFEST, fingerprint, kept_stats
from kubetune.data.prepared.identity import content_of, remember
from kubetune.data.prepared.row_writer import RowWriter
from kubetune.data.prepared.rows import Rows
from kubetune.data.prepared.tally import require_all_rows
from kubetune.data.reading.sources import names_of, require_sources
from kubetune.data.reading.strict_json import JsonObject
from kubetune.data.spec import DataSpec, Split
from kubetune.data.text.class_labels import Labels
from kubetune.data.text.tokenizer import Tokenizer, cache_folder, load_tokenizer
from kubetune.data.vision.image_processor import processor_of
from kubetune.rundir.starts import day_of

__all__ = ["Prepared", "Rows", "load_prepared", "prepare"]

# When fewer bytes were read, a log line is not worth it.
_WORTH_LOGGING_BYTES: Final = 1 << 30

LABELS: Final = "labels.json"


@dataclass(frozen=True)
class Prepared:
    """Data ready for training."""

    path: Path
    fingerprint: str
    spec: DataSpec
    tokenizer: Tokenizer
    train: Rows
    eval: Rows | None
    # What became of the records of each split.
    stats: dict[Split, JsonObject]
    # A classifier's; None for language models.
    labels: Labels | None = None
    # Rows whose loss is only watched.
    forget: Rows | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of all."""
        splits = (self.train, self.eval, self.forget)
        return max(rows.longest for rows in splits if rows is not None)


def prepare(config: Config, *, progress: Callable[[int], None] | None = None) -> Prepared:
    """Return the prepared data of a run, which this tokenises unless the cache has them.

    `progress` is called with the number of records done. Any number of processes may call this at once: one works,
    the others wait for it. Raise DataError if records are bad or too many would be left out; then nothing is kept.
    """
    spec = DataSpec.of(config)
    cache = cache_folder(spec.data.cache)
    require_sources(spec.sources)
    tokenizer = load_tokenizer(spec.model, cache, date=day_of(spec.data))

    # The fingerprint is the folder's name, so other settings make another folder, and nothing is ever out of date.
    key = fingerprint(spec, tokenizer)
    folder = cache / "prepared" / key[:32]
    with lock(folder.with_suffix(".lock"), wait=True):
        if os.path.lexists(folder):
            damage = damage_of(folder, key, cache)
            if damage is not None:
                _set_aside(folder, damage)
        if not os.path.lexists(folder):
            _build(folder, key, spec, tokenizer, progress)
            _remember_checksums(folder, cache)

    prepared = load_prepared(folder, tokenizer, spec)
    # How many records may be left out is not part of the fingerprint, so it is checked at each start.
    require_all_rows(spec.data, prepared.stats)
    return prepared


def damage_of(folder: Path, key: str, cache: Path) -> str | None:
    """Return what is wrong with the prepared data of a fingerprint, None if every byte is as it was written.

    A large file that has not changed since its checksum was computed is not read again.
    """
    began = time.perf_counter()
    bytes_read = 0

    def digest(path: Path) -> str:
        nonlocal bytes_read
        content, size = content_of(path, cache)
        bytes_read += size
        return content.sha256

    if not (folder / MANIFEST).is_file():
        return f"has no {MANIFEST}"
    try:
        text = (folder / MANIFEST).read_text()
        listed = json.loads(text)["files"]
        # Compared as text: JSON forgives changes that a checksum would not.
        if text != manifest_text(key, listed):
            return f"has a damaged {MANIFEST}"
        damage = whole_folder.damage(
            folder,
            listed,
            but=MANIFEST,
            digest=digest,
        )
    # Whatever a damaged file may hold: no JSON, JSON of another form, or nested a thousand times.
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return f"has a damaged {MANIFEST} ({type(error).__name__}: {error})"

    if bytes_read >= _WORTH_LOGGING_BYTES:
        seconds = time.perf_counter() - began
        logs.DATA.info(
            "%s of prepared data read for their checksums in %.1f s", size_of(bytes_read), seconds
        )

    return damage


def _set_aside(folder: Path, damage: str) -> None:
    """Move damaged rows out of the way and log it. Their sources exist, so they can be made again."""
    # One damaged folder is kept, for whoever wants to know what has changed in it.
    aside = folder.with_name(f"damaged-{folder.name}")
    whole_folder.remove(aside)
    with explained_writes(aside):
        os.rename(folder, aside)
    logs.DATA.warning(
        "the prepared data %s %s: they are prepared again from their sources. What was damaged is in %s and may "
        "be deleted. Bits that change by themselves point to a failing disk or memory",
        folder,
        damage,
        aside,
    )


def _remember_checksums(folder: Path, cache: Path) -> None:
    """Keep the checksums of what was just written, so that the next start does not read it for them."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for name, facts in manifest["files"].items():
        remember(folder / name, facts["sha256"], cache)


def manifest_text(key: str, sums: JsonObject) -> str:
    """Return the manifest of a folder. `sums`: file -> size and SHA-256."""
    return json.dumps({"format": FORMAT, "fingerprint": key, "files": sums}, indent=1)


def load_prepared(
    folder: Path,
    tokenizer: Tokenizer,
    spec: DataSpec,
) -> Prepared:
    """Open a folder that `prepare` wrote for the same settings."""
    manifest = json.loads((folder / MANIFEST).read_text())
    processor = processor_of(spec, tokenizer)
    rows = {}
    for split, of_split in spec.splits.items():
        weights = [source.weight for source in of_split]
        rows[split] = Rows(
            folder / split,
            weights,
            processor,
            names_of(of_split),
        )

    stats = kept_stats(folder, spec)
    labels = None
    if (folder / LABELS).is_file():
        labels = Labels.read(folder / LABELS)
    return Prepared(
        path=folder,
        fingerprint=manifest["fingerprint"],
        spec=spec,
        tokenizer=tokenizer,
        train=rows["train"],
        eval=rows.get("eval"),
        stats=stats,
        labels=labels,
        forget=rows.get("forget"),
    )


def _build(
    folder: Path,
    key: str,
    spec: DataSpec,
    tokenizer: Tokenizer,
    progress: Callable[[int], None] | None,
) -> None:
    """Write the rows, and the manifest last, so that a folder with a manifest is complete."""
    # The caller holds the lock, so nobody works in a folder that a killed run left.
    whole_folder.remove_leftovers(folder.parent, folder.name)
    with whole_folder.written(folder, "prepare") as partial:
        _write_rows(partial, spec, tokenizer, progress)
        sums = whole_folder.checksums(partial)
        write_atomic(partial / MANIFEST, manifest_text(key, sums))


def _write_rows(
    folder: Path,
    spec: DataSpec,
    tokenizer: Tokenizer,
    progress: Callable[[int], None] | None,
) -> None:
    """Encode all records, and write their rows, facts, labels and counts."""
    data_pass = DataPass(spec, tokenizer)
    done = 0  # records
    with ExitStack() as stack:
        # Rows come in the order of the records, of all splits mixed, and each goes to the writer of its split.
        writers = {}
        for split in data_pass.sources:
            writer = RowWriter(folder / split, spec.record_kind, pictured=data_pass.has_images)
            writers[split] = stack.enter_context(writer)

        stack.enter_context(
            reminders.reminding(
                lambda taken: logs.DATA.info("%s records prepared in %s", f"{done:,}", taken)
            )
        )

        for result in stack.enter_context(closing(data_pass.results())):
            writers[result.split].write(result.source, result.chunk)
            done += result.tally.records
            fault_injection.reach("prepare")
            if progress:
                progress(done)

    # Bad records are reported together, at the end, so that a user can fix all of them at once.
    data_pass.problems.raise_if_any()

    # What is beside the rows: facts, labels, counts.
    data_facts.write(folder, data_facts.learn(spec.data.train[0], spec.record_kind))
    if data_pass.labels is not None:
        data_pass.labels.write(folder / LABELS)
    all_stats = data_pass.stats()
    require_all_rows(spec.data, all_stats)
    for split, stats in all_stats.items():
        write_atomic(folder / split / "stats.json", json.dumps(stats, indent=1))
