"""Converts a published data set: in flat memory, in order, whole or not at all.

Everything is written into a hidden folder beside the output, which gets its name when all of it is on disk. What a
record becomes is the recipe's work.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Final

from kubetune.base import fault_injection, whole_folder
from kubetune.base.files import lock
from kubetune.base.processes import usable_cores
from kubetune.data.reading.fields import NOTHING, text_of
from kubetune.data.reading.images import UnusableImage
from kubetune.data.reading.problems import Problems
from kubetune.data.reading.readers import read_file
from kubetune.data.reading.record import Record
from kubetune.errors import ConfigError, DataError
from kubetune.plugins.recipes import RECIPES
from kubetune.plugins.recipes.files import Splits
from kubetune.plugins.recipes.images import ImageSource, save_images
from kubetune.plugins.recipes.recipe import Converted, Options, Recipe, Skipped

# Changes when the same input would give other rows.
FORMAT: Final = 4
FACTS: Final = "conversion.json"
STATS: Final = "stats.json"
# So many skipped records are described, the first; all are counted.
MOST_ERRORS: Final = 100
# The reason of records that the user did not ask for: counted, but no error.
FILTERED: Final = "filtered_by_source"
# Records whose images are decoded at once.
BATCH_RECORDS: Final = 256

# progress(what, done): records of a split, or images of a data set
Progress = Callable[[str, int], None]
Outcome = Converted | Skipped | UnusableImage


@dataclass(frozen=True)
class Request:
    """A conversion to be done."""

    recipe: Recipe
    splits: Splits
    options: Options
    images: ImageSource
    output: Path  # folder
    keep_sources: tuple[str, ...] = ()  # source sets to keep, empty for all
    max_samples: int | None = None  # records of each split, from the first

    def facts(self) -> dict[str, Any]:
        """Return all that decides the rows."""
        files = []
        for split in self.splits.values():
            for file in split:
                status = file.stat()
                files.append([str(file.resolve()), status.st_size, status.st_mtime_ns])
        return {
            "format": FORMAT,
            "recipe": self.recipe.name,
            "style": self.options.style,
            "max_history_rounds": self.options.max_history_rounds,
            "sources": list(self.keep_sources),
            "max_samples": self.max_samples,
            "images": str(self.images.folder or self.images.data_set),
            "splits": list(self.splits),
            "files": files,
        }


@dataclass
class Tally:
    """What became of the records of one split."""

    read: int = 0  # records
    rows: int = 0
    rounds: int = 0
    images_saved: int = 0
    skipped: Counter[str] = field(default_factory=Counter)  # records by reason
    # what was mended or left out inside of records that were used
    notes: Counter[str] = field(default_factory=Counter)
    # records in which a key says something that is in no row
    unused_keys: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)  # the first ones, in words

    def skip(self, where: str, error: Skipped | UnusableImage) -> None:
        """Count a record that was skipped; `where` says which."""
        self.skipped[error.reason] += 1
        if error.reason != FILTERED and len(self.errors) < MOST_ERRORS:
            self.errors.append(f"{where}: {error.reason}: {error}")

    def summary(self) -> dict[str, Any]:
        """Return what stats.json says of a split; the same for the same input and settings, so no times."""
        return {
            "samples_processed": self.read,
            "samples_used": self.read - self.skipped.total(),
            "skipped": self.skipped.total(),
            "no_image": self.skipped["no_image"],
            "no_conversations": self.skipped["no_conversations"],
            FILTERED: self.skipped[FILTERED],
            "total_rounds": self.rounds,
            "examples_generated": self.rows,
            "images_saved": self.images_saved,
            "skipped_by_reason": dict(sorted(self.skipped.items())),
            "notes": dict(sorted((+self.notes).items())),
            "keys_not_used": dict(sorted(self.unused_keys.items())),
            "errors": self.errors,
        }


def load_recipe(name: str) -> Recipe:
    """Return a recipe by its name on the command line."""
    recipe: Recipe = import_module(RECIPES[name]).RECIPE
    return recipe


def convert_recipe(request: Request, progress: Progress) -> tuple[dict[str, Any], bool]:
    """Write the rows of all splits, `stats.json` and `conversion.json`, or see that they are there already.

    Return the statistics by split, and whether anything was done. Raise DataError when nothing would come of it,
    ConfigError where the output holds anything else.
    """
    output = request.output.expanduser().absolute()
    facts = request.facts()
    if os.path.ismount(output):
        raise ConfigError(
            f"--output {output} is where a volume is mounted; give a folder in it. Nothing was written."
        )
    lock_file = output.with_name(f".{output.name}.lock")
    # Two conversions into one folder would remove each other's leftovers.
    with lock(lock_file, wait=False):
        try:
            # An empty folder is as good as none.
            is_empty_folder = output.is_dir() and not any(output.iterdir())
            if output.exists() and not is_empty_folder:
                return _stats_of(output, facts), False

            # What a killed conversion left half-written.
            whole_folder.remove_leftovers(output.parent, output.name)
            with whole_folder.written(output, "convert") as folder:
                stats = _convert(request, folder, progress)
                (folder / STATS).write_text(json.dumps(stats, indent=1, ensure_ascii=False))
                (folder / FACTS).write_text(json.dumps(facts, indent=1))
        finally:
            lock_file.unlink()
    return stats, True


def _stats_of(output: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the statistics of an output with these facts. Raise ConfigError where it is anything else."""
    problem = "exists and holds no conversion"
    if (output / FACTS).is_file():
        if json.loads((output / FACTS).read_text()) == facts:
            stats: dict[str, Any] = json.loads((output / STATS).read_text())
            return stats
        problem = "holds a conversion of other data or with other settings"
    raise ConfigError(
        f"--output {output} {problem}; remove it, or give another folder. Nothing was written."
    )


def _convert(request: Request, folder: Path, progress: Progress) -> dict[str, Any]:
    """Fetch the images of the hub and write the rows of all splits; return the statistics."""
    # The images of the hub are fetched before any row is written, since a row of an image that is missing is skipped.
    named: dict[str, set[str]] = {}
    saved: set[str] = set()
    if request.images.data_set is not None:
        all_named: set[str] = set()
        for split in request.splits:
            named[split] = _named_images(request, split)
            all_named |= named[split]
        saved = save_images(all_named, request.images.data_set, folder, progress)
    find_image = request.images.finder(saved)

    stats = {}
    for split in request.splits:
        tally = _convert_split(request, split, folder, find_image, progress)
        tally.images_saved = len(saved & named.get(split, set()))
        if not tally.rows:
            reasons = [f"{number:,} {reason}" for reason, number in tally.skipped.most_common()]
            examples = "".join(f"\n  {error}" for error in tally.errors[:3])
            raise DataError(
                f"{split}: none of {tally.read:,} records can be used: "
                f"{', '.join(reasons) or 'there are none'}.{examples}\nNothing was written."
            )
        stats[split] = tally.summary()
    return stats


def _convert_split(
    request: Request,
    split: str,
    folder: Path,
    find_image: Callable[[str], str],
    progress: Progress,
) -> Tally:
    """Write the rows of a split and return what became of its records."""
    recipe = request.recipe
    tally = Tally()

    # Run in threads, so errors are returned, and counted in the order of the records.
    def convert(record: Record) -> Outcome:
        try:
            path = _image_of(record, request.keep_sources)
            converted = recipe.convert(record.value, path is not None, request.options)
            if path is not None:
                images = [find_image(path)]
                for row in converted.rows:
                    row["images"] = images
        except (Skipped, UnusableImage) as error:
            return error
        return converted

    name = recipe.file_name(request.options.style, split)
    with (
        open(folder / name, "w", encoding="utf-8") as file,
        # To decode images keeps all cores busy.
        ThreadPoolExecutor(usable_cores()) as pool,
    ):
        records = _records(request, split)
        # `map` would read all records at once.
        while batch := list(islice(records, BATCH_RECORDS)):
            for record, outcome in zip(batch, pool.map(convert, batch), strict=True):
                fault_injection.reach("convert")
                identity = _identity(record, f"{split}_{tally.read:06d}")
                tally.read += 1

                if not isinstance(outcome, Converted):
                    tally.skip(f"{Path(record.file).name}:{record.line}: {identity}", outcome)
                    continue
                tally.rows += len(outcome.rows)
                tally.rounds += outcome.rounds
                tally.notes.update(outcome.notes)
                tally.unused_keys.update(recipe.unused_keys(record.value))
                for row in outcome.rows:
                    line = json.dumps({"id": identity, **row}, ensure_ascii=False)
                    file.write(f"{line}\n")
            progress(split, tally.read)
    return tally


def _records(request: Request, split: str) -> Iterator[Record]:
    """Yield the records that are asked for. Raise DataError where a file of them is damaged."""
    left = request.max_samples
    for file in request.splits[split]:
        problems = Problems()
        for record in islice(read_file(file, problems), left):
            yield record
            left = left and left - 1
        problems.raise_if_any()


def _identity(record: Record, default: str) -> str:
    """Return the name of a record in its rows."""
    identity = record.value.get("id")
    if identity is None:
        return default
    # A file cannot hold half a surrogate pair, which JSON can.
    return str(identity).encode("utf-8", "replace").decode()


def _image_of(record: Record, keep_sources: tuple[str, ...]) -> str | None:
    """Return the path of a record's image. Raise Skipped where it is none, or of a set that nobody asked for."""
    path = record.value.get("image")
    has_image = path not in NOTHING and not str(path).isspace()

    # The first folder of a path is the data set that the image comes from; `images/1.jpg` does not say it.
    source = "other"
    if isinstance(path, str) and "/" in path and not path.startswith("images/"):
        source = path.partition("/")[0]
    if keep_sources and source not in keep_sources:
        raise Skipped(FILTERED, f"source {source} was not asked for")
    if not has_image:
        return None
    try:
        return text_of(path, "image")
    except ValueError as error:
        raise Skipped("bad_image", str(error)) from None


def _named_images(request: Request, split: str) -> set[str]:
    """Return the paths of the images that the records of a split name."""
    paths = set()
    for record in _records(request, split):
        try:
            path = _image_of(record, request.keep_sources)
        except Skipped:
            continue
        if path is not None:
            paths.add(path)
    return paths
