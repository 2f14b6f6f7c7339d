"""From sources to prepared rows: tokenised once by all cores, kept under a fingerprint, whole or not at all.

Runs before any process group exists, so that nobody waits in a collective while one process tokenises.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from kubetune.config.schema import Config, SourceConfig
from kubetune.data.order import Ids
from kubetune.data.pipeline import Batch, Split, Tally, Worker, encode_batches, make_batches
from kubetune.data.problems import Problems
from kubetune.data.rows import Rows, RowWriter
from kubetune.data.selection import hold_out, select_rows
from kubetune.data.sources import count_rows, input_digests, locate, read_source
from kubetune.data.tokenizer import DEFAULT_CACHE, Tokenizer, load_tokenizer
from kubetune.errors import DataError
from kubetune.files import (
    explained_writes,
    fsync_folder,
    lock,
    remove_tree_atomically,
    sha256_file,
    temporary_sibling,
    write_atomic,
)

__all__ = ["Prepared", "Rows", "load_prepared", "prepare"]

FORMAT: Final = 1
"""Changes when the same input would give other rows, or the files another form."""


@dataclass(frozen=True)
class Prepared:
    """Data ready for training. `stats` maps split and source to what became of its records."""

    path: Path
    fingerprint: str
    tokenizer: Tokenizer
    train: Rows
    eval: Rows | None
    stats: dict[str, Any]


def prepare(config: Config, *, progress: Callable[[int], None] | None = None) -> Prepared:
    """Tokenise the data of a run, or find them already prepared.

    `progress` is called with the number of records done. Any number of processes may call this at once: one works,
    the others wait for it. Raises DataError when records are bad or too many would be left out; nothing is kept then.
    """
    cache = Path(config.data.cache or DEFAULT_CACHE).expanduser()
    tokenizer = load_tokenizer(config.model, cache)
    key = fingerprint(config, tokenizer)
    folder = cache / "prepared" / key[:32]
    with lock(folder.with_suffix(".lock"), wait=True):
        if not is_whole(folder):
            _remove_leftovers(folder)
            _build(folder, key, config, tokenizer, progress)
    prepared = load_prepared(folder, tokenizer, config)
    for split in split_sources(config):
        require_rows(config, split, prepared.stats[split])
    return prepared


def load_prepared(folder: Path, tokenizer: Tokenizer, config: Config) -> Prepared:
    """Open a folder that `prepare` wrote for this config."""
    manifest = json.loads((folder / "manifest.json").read_text())
    sources = split_sources(config)
    rows = {split: Rows(folder / split, [source.weight for source in given]) for split, given in sources.items()}
    return Prepared(
        path=folder,
        fingerprint=manifest["fingerprint"],
        tokenizer=tokenizer,
        train=rows["train"],
        eval=rows.get("eval"),
        stats={split: json.loads((folder / split / "stats.json").read_text()) for split in sources},
    )


def fingerprint(config: Config, tokenizer: Tokenizer) -> str:
    """SHA-256 of all that decides the prepared rows: bytes of the inputs, tokenizer, template and settings.

    The sources' weights are not among it: they decide how often a row is used, not what it is.
    """
    data = config.data
    sources = {"train": data.train, "eval": data.eval if isinstance(data.eval, tuple) else ()}
    seeded = isinstance(data.eval, float) or any(
        source.range or locate(source).sample for source in (*sources["train"], *sources["eval"])
    )
    facts = {
        "format": FORMAT,
        "task": config.task,
        "tokenizer": tokenizer.fingerprint,
        "settings": data.model_dump(include={"max_length", "overlong", "train_on", "add_special_tokens"}),
        "share": data.eval if isinstance(data.eval, float) else None,
        "seed": config.training.seed if seeded else None,
        "sources": {split: [_source_facts(source) for source in given] for split, given in sources.items()},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _source_facts(source: SourceConfig) -> dict[str, Any]:
    facts = source.model_dump(include={"format", "columns", "subset", "split", "range"})
    return facts | {"sample": locate(source).sample, "inputs": input_digests(source)}


def is_whole(folder: Path, *, thorough: bool = False) -> bool:
    """Whether a folder of prepared data is complete: every file has its size and, if `thorough`, its checksum."""
    try:
        files = json.loads((folder / "manifest.json").read_text())["files"]
        return all(
            (folder / name).stat().st_size == facts["bytes"]
            and (not thorough or sha256_file(folder / name) == facts["sha256"])
            for name, facts in files.items()
        )
    except (OSError, ValueError, KeyError):
        return False


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed runs left. The lock is held, so nobody is working on any of it."""
    for leftover in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    remove_tree_atomically(folder)


def _build(
    folder: Path, key: str, config: Config, tokenizer: Tokenizer, progress: Callable[[int], None] | None
) -> None:
    """Write the rows into a hidden folder and rename it when all is on disk, the manifest last."""
    temporary = temporary_sibling(folder)
    try:
        with explained_writes(folder):
            temporary.mkdir()
            _write_rows(temporary, config, tokenizer, progress)
            files = [file for file in sorted(temporary.rglob("*")) if file.is_file()]
            facts = {
                str(file.relative_to(temporary)): {"bytes": file.stat().st_size, "sha256": sha256_file(file)}
                for file in files
            }
            manifest = {"format": FORMAT, "fingerprint": key, "files": facts}
            write_atomic(temporary / "manifest.json", json.dumps(manifest, indent=1))
            os.rename(temporary, folder)
            fsync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_rows(
    folder: Path, config: Config, tokenizer: Tokenizer, progress: Callable[[int], None] | None
) -> None:
    sources = split_sources(config)
    tallies = {split: [Tally() for _ in given] for split, given in sources.items()}
    problems = Problems()
    worker = Worker(tokenizer, config.data, sources)
    done = 0
    with ExitStack() as stack:
        writers = {split: stack.enter_context(RowWriter(folder / split)) for split in sources}
        batches = plan_batches(config, problems)
        for result in encode_batches(worker, batches, problems, config.data.num_proc):
            writers[result.split].write(result.source, result.chunk)
            tallies[result.split][result.source].add(result.tally)
            done += len(result.lengths)
            if progress:
                progress(done)
    problems.raise_if_any()
    for split, given in tallies.items():
        stats = summarise(sources[split], given)
        require_rows(config, split, stats)
        write_atomic(folder / split / "stats.json", json.dumps(stats, indent=1))


def split_sources(config: Config) -> dict[Split, tuple[SourceConfig, ...]]:
    """The sources of each split; a share held out comes from the sources of training."""
    given = config.data.eval
    if not given:
        return {"train": config.data.train}
    return {"train": config.data.train, "eval": config.data.train if isinstance(given, float) else given}


def plan_batches(config: Config, problems: Problems) -> Iterator[Batch]:
    """Read every record that the config asks for, in the order of the sources, training before evaluation."""
    data, seed = config.data, config.training.seed
    taken = [select_rows(source, seed) for source in data.train]
    held_out: list[Ids | None] = [None] * len(taken)
    if isinstance(data.eval, float) and data.eval:
        taken = [
            np.arange(count_rows(source), dtype=np.int64) if ids is None else ids
            for source, ids in zip(data.train, taken, strict=True)
        ]
        held_out = [*hold_out([ids for ids in taken if ids is not None], data.eval, seed)]
    for index, source in enumerate(data.train):
        split_of = _splitter("train", taken[index], held_out[index])
        yield from make_batches(read_source(source, problems), index, split_of)
    for index, source in enumerate(data.eval if isinstance(data.eval, tuple) else ()):
        split_of = _splitter("eval", select_rows(source, seed), None)
        yield from make_batches(read_source(source, problems), index, split_of)


def _splitter(split: Split, taken: Ids | None, held_out: Ids | None) -> Callable[[int], Split | None]:
    if taken is None:
        return lambda _: split
    fates: list[Split | None] = [None, split, "eval"]
    fate = np.zeros(int(taken.max()) + 1, np.uint8)
    fate[taken] = 1
    if held_out is not None:
        fate[held_out] = 2
    codes = fate.tobytes()
    return lambda index: fates[codes[index]] if index < len(codes) else None


def summarise(sources: Sequence[SourceConfig], tallies: Sequence[Tally]) -> dict[str, Any]:
    """What stats.json holds: what became of the records, in all and by source."""
    total = Tally()
    for tally in tallies:
        total.add(tally)
    by_source = [{"path": source.path, **asdict(tally)} for source, tally in zip(sources, tallies, strict=True)]
    return {**asdict(total), "lost_share": total.lost_share, "sources": by_source}


def require_rows(config: Config, split: Split, stats: dict[str, Any]) -> None:
    """Raise DataError when a split has no rows, or more of its records are left out than the config allows."""
    allowed, limit = config.data.max_lost_share, config.data.max_length
    if not stats["records"]:
        raise DataError(f"data.{split} holds no records. Nothing was written.")
    if stats["rows"] and stats["lost_share"] <= allowed:
        return
    lost = stats["overlong"] + stats["no_label"]
    raise DataError(
        f"data.{split}: {lost:,} of {stats['records']:,} records ({stats['lost_share']:.1%}) would be left out: "
        f"{stats['overlong']:,} longer than data.max_length {limit:,} (the longest has {stats['longest']:,} tokens), "
        f"{stats['no_label']:,} with nothing to learn (no answer, or it was cut off). data.max_lost_share allows "
        f"{allowed:.0%}. Raise data.max_length, set data.overlong to truncate, mend the data, or raise "
        "data.max_lost_share. Nothing was written."
    )
