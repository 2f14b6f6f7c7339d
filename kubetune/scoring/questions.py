"""Rows of the evaluation data as questions: a row without its last answer, which is what is expected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from kubetune.config.schema import Config
from kubetune.data.prepared.order import hash_ids
from kubetune.data.prepared.pipeline import Split
from kubetune.data.prepared.rows import Rows
from kubetune.data.reading.problems import Problems
from kubetune.data.reading.sources import read_source
from kubetune.data.reading.splits import split_sources
from kubetune.data.vision.image_processor import ImageRef

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Question:
    """A row cut in two: `ids` up to its last answer, and the ids of that. `is_whole`: the row is trained from its start
    on, and is cut in its middle."""

    row: int
    ids: tuple[int, ...]
    answer: tuple[int, ...]
    images: tuple[ImageRef, ...] = ()
    is_whole: bool = False


def drawn(rows: Rows) -> Iterator[Question]:
    """The rows that have something to be answered as questions, in an order that is the same each time.

    A pair of answers is asked for the chosen one.
    """
    ids = np.arange(len(rows), dtype=np.int64)
    for index in ids[np.argsort(hash_ids(ids, "sample"), kind="stable")].tolist():
        if rows.targets is not None and rows.splits is None and not rows.targets[index].any():
            continue  # an answer that was judged to be bad
        row, trained = rows.sequences(index)[0]
        if (found := cut(trained)) is None:
            continue
        begin, is_whole = found
        images = rows.images(index) if rows.processor is not None else ()
        yield Question(
            index, tuple(row[:begin].tolist()), tuple(row[begin:].tolist()), images, is_whole
        )


def cut(trained: NDArray[np.bool_]) -> tuple[int, bool] | None:
    """Beginning of the last answer in a sequence, and whether that is trained whole and cut in its middle.

    `trained`: for each token whether it is a label; None where none is.
    """
    places = np.flatnonzero(trained)
    if not len(places):
        return None
    breaks = np.flatnonzero(np.diff(places) > 1)
    begin = int(places[breaks[-1] + 1] if len(breaks) else places[0])
    return (begin, False) if begin > 1 else (max(1, (int(places[-1]) + 1) // 2), True)


def records_of(
    config: Config, split: Split, rows: Rows, wanted: list[int]
) -> dict[int, dict[str, Any]]:
    """The records, as they were read, that these rows of a split were made of."""
    by_source: dict[int, dict[int, int]] = {}
    for index in wanted:
        by_source.setdefault(int(rows.source[index]), {})[int(rows.record[index])] = index
    found = {}
    for source, numbers in by_source.items():
        records = read_source(split_sources(config)[split][source], Problems())
        for number, record in enumerate(islice(records, max(numbers) + 1)):
            if number in numbers:
                found[numbers[number]] = record.value
    return found
