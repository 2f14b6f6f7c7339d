"""Converts a published data set: in flat memory, in order, whole or not at all.

Everything is written into a hidden folder beside the output, which gets its name when all of it is on disk. What a
record becomes is the recipe's work.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

from kubetune.base import fault_injection, whole_folder
from kubetune.base.locks import lock
from kubetune.data.reading.fields import NOTHING, text_of
from kubetune.data.reading.images import UnusableImage
from kubetune.data.reading.readers import read_file
from kubetune.data.reading.record import Record
from kubetune.data.reading.record_problems import Problems
from kubetune.errors import ConfigError, DataError
from kubetune.plugins.recipes.dataset_files import Splits
from kubetune.plugins.recipes.recipe import Converted, DataRecipe, Options, Skipped
from kubetune.plugins.recipes.record_images import Images, image_folder, save_coco

# Changes when the same input would give other rows.
FORMAT: Final = 5
FACTS: Final = "conversion.json"
STATS: Final = "stats.json"
# So many skipped records are described, the first; all are counted.
MOST_ERRORS: Final = 100

# progress(what, done): records of a split, or images
Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class ConversionRequest:
    """A conversion to be done."""

    recipe: DataRecipe
    splits: Splits
    options: Options
    images: str | None  # a folder, `hub`, or None to look for none
    output: Path  # folder
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
            **asdict(self.options),
            "max_samples": self.max_samples,
            "images": str(image_folder(self.images) or self.images),
            "splits": list(self.splits),
            "files": files,
        }


@dataclass
class Tally:
    """What became of the records of one split."""

    read: int = 0  # records
    rows: int = 0
    rounds: int = 0
    skipped: Counter[str] = field(default_factory=Counter)  # records by reason
    # what was fixed or left out inside of records that were used
    notes: Counter[str] = field(default_factory=Counter)
    # records in which a key says something that is in no row
    unused_keys: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)  # the first ones, in words

    def skip(self, record: Record, error: Skipped | UnusableImage) -> None:
        """Count a record that was skipped."""
        self.skipped[error.reason] += 1
        if len(self.errors) < MOST_ERRORS:
            where = f"{Path(record.file).name}:{record.line}"
            self.errors.append(f"{where}: {error.reason}: {error}")

    def summary(self) -> dict[str, Any]:
        """Return what stats.json says of a split; the same for the same input and settings, so no times."""
        return {
            "samples_processed": self.read,
            "skipped": self.skipped.total(),
            "total_rounds": self.rounds,
            "examples_generated": self.rows,
            "skipped_by_reason": dict(sorted(self.skipped.items())),
            "notes": dict(sorted((+self.notes).items())),
            "keys_not_used": dict(sorted(self.unused_keys.items())),
            "errors": self.errors,
        }


def convert_recipe(request: ConversionRequest, progress: Progress) -> tuple[dict[str, Any], bool]:
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
            if output.is_file() or (output.is_dir() and any(output.iterdir())):
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
    if (output / FACTS).is_file() and json.loads((output / FACTS).read_text()) == facts:
        stats: dict[str, Any] = json.loads((output / STATS).read_text())
        return stats
    raise ConfigError(
        f"--output {output} exists, and does not hold the conversion of these data with these settings; remove it, or "
        "give another folder. Nothing was written."
    )


def _convert(request: ConversionRequest, folder: Path, progress: Progress) -> dict[str, Any]:
    """Save the images of the hub and write the rows of all splits; return the statistics."""
    images = _images(request, folder, progress)
    stats = {}
    for split in request.splits:
        tally = _convert_split(request, split, folder, images, progress)
        if not tally.rows:
            reasons = [f"{number:,} {reason}" for reason, number in tally.skipped.most_common()]
            examples = "".join(f"\n  {error}" for error in tally.errors[:3])
            raise DataError(
                f"{split}: none of {tally.read:,} records can be used: "
                f"{', '.join(reasons) or 'there are none'}.{examples}\nNothing was written."
            )
        stats[split] = tally.summary()
    return stats


def _images(request: ConversionRequest, folder: Path, progress: Progress) -> Images:
    """Return where images are. Those of the hub are saved before any row is written."""
    if request.images != "hub":
        return Images(folder=image_folder(request.images))
    # A row whose image is missing is skipped, so all paths are collected first.
    paths = set()
    for split in request.splits:
        for record in _records(request, split):
            path = record.value.get("image")
            if isinstance(path, str):
                paths.add(path)
    return Images(saved=save_coco(paths, folder, progress))


def _convert_split(
    request: ConversionRequest, split: str, folder: Path, images: Images, progress: Progress
) -> Tally:
    """Write the rows of a split and return what became of its records."""
    tally = Tally()
    name = request.recipe.file_name(request.options.style, split)
    # An id may hold half a surrogate pair, which JSON can and a file cannot.
    with open(folder / name, "w", encoding="utf-8", errors="replace") as file:
        for record in _records(request, split):
            fault_injection.reach("convert")
            tally.read += 1
            progress(split, tally.read)
            try:
                converted = _convert_record(request, record, images)
            except (Skipped, UnusableImage) as error:
                tally.skip(record, error)
                continue

            tally.rows += len(converted.rows)
            tally.rounds += converted.rounds
            tally.notes.update(converted.notes)
            tally.unused_keys.update(converted.unused_keys)
            for row in converted.rows:
                line = json.dumps({"id": record.value.get("id"), **row}, ensure_ascii=False)
                file.write(f"{line}\n")
    return tally


def _records(request: ConversionRequest, split: str) -> Iterator[Record]:
    """Yield the records that are asked for. Raise DataError where a file of them is damaged."""
    left = request.max_samples
    for file in request.splits[split]:
        problems = Problems()
        for record in islice(read_file(file, problems), left):
            yield record
            left = left and left - 1
        problems.raise_if_any()


def _convert_record(request: ConversionRequest, record: Record, images: Images) -> Converted:
    """Return the rows of a record with their image. Raise Skipped or UnusableImage where there are none."""
    path = None
    if record.value.get("image") not in NOTHING:
        try:
            path = text_of(record.value["image"], "image")
        except ValueError as error:
            raise Skipped("bad_image", str(error)) from None

    converted = request.recipe.convert(record.value, path is not None, request.options)
    if path is not None:
        image = images.find(path)
        for row in converted.rows:
            row["images"] = [image]
    return converted
