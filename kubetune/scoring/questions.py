"""Rows of the evaluation data as questions: a row without its last answer, which is what is expected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from kubetune.config.schema import SourceConfig
from kubetune.data.prepared.order import hash_ids
from kubetune.data.prepared.rows import Rows
from kubetune.data.reading.problems import Problems
from kubetune.data.reading.sources import read_source
from kubetune.data.text.answers import last_answer
from kubetune.data.vision.image_processor import ImageRef


@dataclass(frozen=True)
class Question:
    """A row of the evaluation data cut in two."""

    row: int
    ids: tuple[int, ...]  # up to the last answer
    answer: tuple[int, ...]  # ids of the last answer
    images: tuple[ImageRef, ...] = ()
    is_whole: bool = False  # the row is trained from its start on, and is cut in its middle


def drawn(rows: Rows) -> Iterator[Question]:
    """Yield the rows that have an answer as questions, in an order that is the same each time.

    A pair of answers is asked for the chosen one.
    """
    ids = np.arange(len(rows), dtype=np.int64)
    order = np.argsort(hash_ids(ids, "sample"), kind="stable")
    for index in order.tolist():
        if rows.targets is not None and rows.splits is None and not rows.targets[index].any():
            continue  # an answer that was judged to be bad
        row, trained = rows.sequences(index)[0]
        place = last_answer(trained.tobytes())
        if place is None:
            continue
        begin, is_whole = place
        prompt = tuple(row[:begin].tolist())
        answer = tuple(row[begin:].tolist())
        images = rows.images(index) if rows.processor is not None else ()
        yield Question(index, prompt, answer, images, is_whole)


def records_of(
    sources: Sequence[SourceConfig], rows: Rows, wanted: list[int]
) -> dict[int, dict[str, Any]]:
    """Return the records, as they were read, that these rows of a split were made of. `sources`: of the split."""
    by_source: dict[int, dict[int, int]] = {}  # source → record → row
    for index in wanted:
        by_source.setdefault(int(rows.source[index]), {})[int(rows.record[index])] = index
    values = {}
    for source, rows_of in by_source.items():
        records = read_source(sources[source], Problems())
        for number, record in enumerate(islice(records, max(rows_of) + 1)):
            if number in rows_of:
                values[rows_of[number]] = record.value
    return values
