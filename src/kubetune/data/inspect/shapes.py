"""What the records of a source are, seen without a tokenizer."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache

from kubetune.config.schema import SourceConfig
from kubetune.data.column_facts import Columns
from kubetune.data.column_words import lacking, nowhere
from kubetune.data.prepared.remarks import written_texts
from kubetune.data.reading.examples import images_of
from kubetune.data.reading.formats import read
from kubetune.data.reading.images import ADDRESS, image_of_row
from kubetune.data.reading.messages import OF_TEMPLATES
from kubetune.data.reading.preferences import likely_kind
from kubetune.data.reading.record_problems import SHOWN, Problems
from kubetune.data.reading.sources import read_source
from kubetune.errors import DataError


@dataclass
class Shapes:
    """Counts of a source's records that take no tokenizer."""

    problems: Problems
    kinds: Counter[str] = field(default_factory=Counter)  # records by what they are
    unused: Counter[str] = field(default_factory=Counter)  # records by keys that nothing reads
    columns: Columns = field(default_factory=Columns)  # what is in those that are columns
    # records by how keys with unclear names were read
    readings: Counter[str] = field(default_factory=Counter)


def check_shapes(source: SourceConfig, *, keep: int | None = SHOWN) -> Shapes:
    """Read and convert all records of a source, without a tokenizer. Images are only looked for."""
    shapes = Shapes(Problems(keep))
    absent: Counter[str] = Counter()
    # Neighbouring records often share an image.
    is_file = lru_cache(maxsize=4096)(os.path.isfile)
    for record in read_source(source, shapes.problems):
        # The task is not known either, so a record is read as what it looks like.
        try:
            reading = read(
                record.value,
                source.format,
                source.columns,
                kind=likely_kind(record.value),
            )
        except ValueError as error:
            shapes.problems.add(record.where, str(error))
            continue

        for key in reading.unused:
            if key not in OF_TEMPLATES:
                shapes.unused[key] += 1
                texts = list(written_texts(reading.example))
                shapes.columns.note(key, record.value, source.columns, texts)
        absent.update(reading.absent)
        if reading.taken:
            shapes.readings[reading.taken] += 1

        # Such as "Chat with images that are not there".
        kind = type(reading.example).__name__
        images = images_of(reading.example)
        if images:
            kind += " with images"
        for image in images:
            if not image.startswith(ADDRESS) and not is_file(image_of_row(record.file, image)):
                kind += " that are not there"
                break
        shapes.kinds[kind] += 1

    problem = nowhere(absent, shapes.kinds.total(), source.path)
    if problem:
        raise DataError(problem)
    for column, number in sorted(absent.items()):
        shapes.readings[lacking(column)] = number
    return shapes
