"""Converts a published data set: in flat memory, by all cores, in order, resumable after a kill, whole or not at all.

Everything is written into a hidden folder beside the output, which is renamed when all of it is on disk. What a record
becomes is the recipe's work; fetching images from the hub is hub_images.py's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

from kubetune.base import fault_injection
from kubetune.base.files import explained_writes, fsync_folder, lock, write_atomic
from kubetune.data.prepared.workers import map_in_processes
from kubetune.data.reading.images import UnusableImage
from kubetune.data.reading.problems import Problems
from kubetune.data.reading.record import Record
from kubetune.errors import ConfigError, DataError
from kubetune.plugins.recipes import RECIPES
from kubetune.plugins.recipes.hub_images import fetch_images
from kubetune.plugins.recipes.image_sources import ImageSources
from kubetune.plugins.recipes.journal import Journal
from kubetune.plugins.recipes.origin import NOTHING, Origin, locate_splits
from kubetune.plugins.recipes.recipe import Options, Recipe, image_path, require_source
from kubetune.plugins.recipes.tally import MOST_ERRORS, Skipped, Tally

FORMAT: Final = 3
"""Changes when the same input would give other rows."""

BATCH_RECORDS: Final = 64
FEW_RECORDS: Final = 8 * BATCH_RECORDS
"""Up to here starting processes takes longer than the work."""

FACTS: Final = "conversion.json"
STATS: Final = "stats.json"
_KILLED: Final = (
    "a process that converts was killed, probably for want of memory; give --workers 1 and run the same command again: "
    "it goes on from where it stopped. No output was written."
)

Progress = Callable[[str, int, int], None]
"""`progress(what, total, done)`; `what` is a split, whose total is a guess until it is done, or that images of a data
set are fetched."""


@dataclass(frozen=True)
class Request:
    """Conversion to be done, and how. `max_samples` counts records of each split, from the first."""

    recipe: Recipe
    origins: tuple[Origin, ...]
    options: Options
    images: ImageSources
    output: Path
    max_samples: int | None = None
    workers: int = 1

    def facts(self) -> dict[str, Any]:
        """All that decides the rows; the number of workers does not."""
        return {
            "format": FORMAT,
            "recipe": self.recipe.name,
            "style": self.options.style,
            "max_history_rounds": self.options.max_history_rounds if self.recipe.rounds else None,
            "sources": list(self.options.sources),
            "max_samples": self.max_samples,
            "images": self.images.facts(),
            "splits": {origin.split: origin.facts() for origin in self.origins},
        }


def load_recipe(name: str) -> Recipe:
    """A recipe by its name on the command line."""
    recipe: Recipe = import_module(RECIPES[name]).RECIPE
    return recipe


def locate_origins(
    recipe: Recipe, source: str | None, splits: tuple[str, ...] | None
) -> tuple[Origin, ...]:
    """The files of the splits asked for, or of those that the data set has. Raises ConfigError or DataError."""
    found = locate_splits(
        source or f"hub:{recipe.hub}", splits or recipe.splits, given=splits is not None
    )
    return tuple(found)


def convert_recipe(
    request: Request, progress: Progress | None = None
) -> tuple[dict[str, Any], bool]:
    """Write the rows of all splits, `stats.json` and `conversion.json`, or find that they are there already.

    Returns the statistics by split, and whether anything was done. A conversion that was killed goes on from where it
    stopped when it is asked for again, and ends with the same bytes. Raises DataError when nothing would come of it.
    """
    facts = request.facts()
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    output = request.output.expanduser().absolute()
    if not _is_free(output):
        return _finished(output, key), False
    work = output.with_name(f".{output.name}.converting")
    with lock(work / ".lock", wait=False):
        try:
            with explained_writes(output):
                if _key_of(work) != key:
                    _begin(work, key)
                    _convert(request, work, progress or (lambda *_: None))
                    write_atomic(work / FACTS, json.dumps({"fingerprint": key, **facts}, indent=1))
                fault_injection.reach("convert.whole")
                stats: dict[str, Any] = json.loads((work / STATS).read_text())
                _publish(work, output)
        except DataError:
            shutil.rmtree(work, ignore_errors=True)
            raise
    return stats, True


def _is_free(output: Path) -> bool:
    if os.path.ismount(output):
        raise ConfigError(
            f"--output {output} is where a volume is mounted; give a folder in it. {NOTHING}"
        )
    return not output.exists() or (output.is_dir() and not any(output.iterdir()))


def _finished(output: Path, key: str) -> dict[str, Any]:
    """The statistics of an output of these settings. Raises ConfigError where it is anything else."""
    found = _key_of(output)
    if found == key:
        stats: dict[str, Any] = json.loads((output / STATS).read_text())
        return stats
    told = (
        "holds a conversion of other data or with other settings"
        if found
        else "exists and holds no conversion"
    )
    raise ConfigError(f"--output {output} {told}; remove it, or give another folder. {NOTHING}")


def _key_of(folder: Path) -> str | None:
    """The fingerprint of a whole conversion; None where there is none."""
    try:
        return str(json.loads((folder / FACTS).read_text())["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _begin(work: Path, key: str) -> None:
    """Make the working folder this conversion's own: what one with other settings left there is removed."""
    marker = work / ".progress" / "fingerprint"
    if marker.is_file() and marker.read_text() == key:
        return
    for entry in work.iterdir():
        if entry.name != ".lock":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    write_atomic(marker, key)


def _publish(work: Path, output: Path) -> None:
    shutil.rmtree(work / ".progress", ignore_errors=True)
    (work / ".lock").unlink(missing_ok=True)
    fsync_folder(work)
    os.rename(work, output)
    fsync_folder(output.parent)


def _convert(request: Request, work: Path, progress: Progress) -> None:
    journals = {
        origin.split: Journal.open(work / ".progress" / f"{origin.split}.json")
        for origin in request.origins
    }
    pending = [origin for origin in request.origins if not journals[origin.split].done]
    if request.max_samples is None:
        for origin in pending:
            origin.require_ends()
    saved = {}
    if request.images.hub:
        needed = {origin.split: _needed_images(request, origin) for origin in pending}
        saved = fetch_images(needed, request.images, work, progress)
    for origin in pending:
        journal = journals[origin.split]
        journal.tally.images_saved = saved.get(origin.split, 0)
        total = request.max_samples or origin.estimate()
        _convert_split(request, origin, journal, work, partial(progress, origin.split, total))
        progress(origin.split, journal.read, journal.read)
    stats = {split: journal.tally.summary() for split, journal in journals.items()}
    for split, journal in journals.items():
        if not journal.tally.rows:
            raise DataError(_nothing_left(split, journal.tally))
    write_atomic(work / STATS, json.dumps(stats, indent=1, ensure_ascii=False))


def _nothing_left(split: str, tally: Tally) -> str:
    reasons = ", ".join(f"{number:,} {reason}" for reason, number in tally.skipped.most_common())
    first = "".join(f"\n  {error}" for error in tally.errors[:3])
    return f"{split}: none of {tally.read:,} records can be used: {reasons or 'there are none'}.{first}\n{NOTHING}"


def _needed_images(request: Request, origin: Origin) -> set[str]:
    """The paths of the images that the records of a split name and the hub is to be asked for."""
    needed = set()
    for record in islice(origin.records(Problems(MOST_ERRORS)), request.max_samples):
        path = image_path(record.value)
        if path is not None and request.images.data_set(path) is not None:
            with contextlib.suppress(Skipped):
                require_source(path, request.options)
                needed.add(path)
    return needed


def _convert_split(
    request: Request, origin: Origin, journal: Journal, work: Path, progress: Callable[[int], None]
) -> None:
    problems = Problems(MOST_ERRORS)
    # What was done already is read again, which takes a small part of the time that converting takes.
    records = islice(origin.records(problems), journal.read, request.max_samples)
    worker = Converter(request, origin.split, work)
    progress(journal.read)
    file = work / request.recipe.file_name(request.options.style, origin.split)
    with (
        journal.appending(file) as stream,
        closing(_results(worker, records, journal.read, request.workers)) as results,
    ):
        for rows, tally in results:
            journal.written += stream.write(rows)
            journal.read += tally.read
            journal.tally.add(tally)
            fault_injection.reach("convert")
            progress(journal.read)
            journal.save_sometimes(stream)
        tally = journal.tally
        tally.read += problems.total
        tally.skipped.update({"bad_json": problems.total} if problems.total else {})
        lines = [
            error.replace(f"{Path(error.partition(':')[0]).parent}/", "", 1)
            for error in problems.first
        ]
        tally.errors = [*lines, *tally.errors][:MOST_ERRORS]
        journal.done = True
        journal.save(stream)


def _results(
    worker: Converter, records: Iterator[Record], start: int, workers: int
) -> Generator[tuple[bytes, Tally]]:
    batches = _batches(records, start)
    first = list(islice(batches, FEW_RECORDS // BATCH_RECORDS + 1))
    if workers > 1 and len(first) * BATCH_RECORDS > FEW_RECORDS:
        yield from map_in_processes(worker, chain(first, batches), workers, if_killed=_KILLED)
    else:
        yield from map(worker, chain(first, batches))


Batch = tuple[int, list[Record]]
"""Records, and the index of the first of them in its split."""


def _batches(records: Iterator[Record], start: int) -> Iterator[Batch]:
    while batch := list(islice(records, BATCH_RECORDS)):
        yield start, batch
        start += len(batch)


class Converter:
    """Turns batches of records into the bytes of their rows; every process has one."""

    def __init__(self, request: Request, split: str, work: Path) -> None:
        self._recipe = request.recipe
        self._options = request.options
        self._image_of = request.images.finder(work)
        self._split = split

    def __call__(self, batch: Batch) -> tuple[bytes, Tally]:
        """The rows, each with its line break, and what became of the records."""
        start, records = batch
        tally, rows = Tally(), []
        for index, record in enumerate(records, start):
            name = record.value.get("id")
            # A file cannot hold half a surrogate pair, which JSON can.
            name = (
                f"{self._split}_{index:06d}"
                if name is None
                else str(name).encode("utf-8", "replace").decode()
            )
            try:
                mine = Tally(read=1)
                found = self._recipe.rows_of(
                    record.value, name, self._options, self._image_of, mine
                )
            except (Skipped, UnusableImage) as error:
                tally.read += 1
                tally.skip(
                    f"{Path(record.file).name}:{record.line}", name, error.reason, str(error)
                )
                continue
            mine.rows = len(found)
            mine.unused_keys.update(self._recipe.unused_keys(record.value))
            tally.add(mine)
            rows += found
        rows.append("")
        return "\n".join(rows).encode(), tally
