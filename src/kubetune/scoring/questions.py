"""Rows of the evaluation data as questions: a row without its last answer, which is what is expected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from kubetune.config.schema import SourceConfig
from kubetune.data.order import shuffled
from kubetune.data.prepared.rows import Rows
from kubetune.data.reading.images import ImageRef
from kubetune.data.reading.record_problems import Problems
from kubetune.data.reading.sources import read_source
from kubetune.data.text.answer_targets import last_answer


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

    # For judged answers, targets are verdicts.
    verdicts = rows.targets
    if verdicts is not None and rows.splits is not None:
        verdicts = None  # margins of pairs
    for index in shuffled(ids, "sample").tolist():
        # An answer that was judged to be bad is no reference.
        if verdicts is not None and not verdicts[index].any():
            continue

        # In a pair, the first sequence is the chosen answer.
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
    sources: Sequence[SourceConfig],
    rows: Rows,
    wanted: list[int],
) -> dict[int, dict[str, Any]]:
    """Return the records, as they were read, that these rows of a split were made of. `sources`: of the split."""
    # The row that each wanted record became, by source.
    row_of: dict[int, dict[int, int]] = {}
    for index in wanted:
        source = int(rows.source[index])
        record = int(rows.record[index])
        row_of.setdefault(source, {})[record] = index

    values = {}
    for source, row_of_record in row_of.items():
        last = max(row_of_record)  # what comes after it need not be read
        records = read_source(sources[source], Problems())
        for number, read in enumerate(islice(records, last + 1)):
            if number in row_of_record:
                values[row_of_record[number]] = read.value

    return values
