"""Counts what can be seen only of all rows together: those that repeat, that are in two splits, labels without rows.

Keeps a few numbers for each row, and no tokens.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import nsmallest
from typing import Any, Final

from kubetune.config.schema import ModelConfig, SourceConfig
from kubetune.data.prepared.pipeline import BatchResult
from kubetune.data.prepared.row_writer import Chunk
from kubetune.data.prepared.tally import MOST_PLACES
from kubetune.data.reading.sources import count_rows, locate
from kubetune.data.reading.strict_json import JsonObject
from kubetune.data.spec import Split
from kubetune.data.text.class_labels import Labels
from kubetune.data.text.odd_labels import marks_among_numbers
from kubetune.plan.base_model import embeddings_of

# Rows that are compared at once: a dict of so many digests takes about 100 MB.
_MOST_OF_A_PART: Final = 1_000_000


@dataclass
class _SeenRows:
    """Numbers about the rows of a split, in the order in which they came."""

    # of each row; of pairs alone also with their answers exchanged
    digests: array[int] = field(default_factory=lambda: array("Q"))
    reversed_digests: array[int] = field(default_factory=lambda: array("Q"))
    # of each row, the index of its source in the split and of its record there
    sources: array[int] = field(default_factory=lambda: array("H"))
    records: array[int] = field(default_factory=lambda: array("I"))
    classes: Counter[str] = field(default_factory=Counter)
    longest: int = 0  # tokens of the longest sequence that is kept
    largest_id: int = -1
    unknown: int = 0  # rows with ids that the model has no embedding for

    def repeats(self) -> JsonObject:
        """Return how many rows repeat an earlier one, and how many pairs an earlier one with its answers exchanged.

        rows      a b a c a
        repeats       2   4    by index
        """
        # A part after the other, so that no dict holds all digests.
        repeats: list[int] = []
        exchanged: list[int] = []
        for part in _parts_of(self.digests):
            first: dict[int, int] = {}  # by digest, the first row that has it
            for row, digest in part(self.digests):
                if first.setdefault(digest, row) != row:
                    repeats.append(row)
            for row, digest in part(self.reversed_digests):
                if first.get(digest, row) < row:
                    exchanged.append(row)

        return {
            "duplicates": len(repeats),
            "duplicate_places": self.places(repeats),
            "reversed": len(exchanged),
            "reversed_places": self.places(exchanged),
        }

    def places(self, rows: list[int]) -> list[list[int]]:
        """Return the first of some rows, each by the index of its source and of its record there."""
        return [[self.sources[row], self.records[row]] for row in nsmallest(MOST_PLACES, rows)]

    def records_of(self, source: int) -> set[int]:
        """Return the records of a source that rows were made of."""
        records = set()
        for index, record in zip(self.sources, self.records, strict=True):
            if index == source:
                records.add(record)
        return records


def _parts_of(digests: array[int]) -> Iterator[Callable[[array[int]], Iterator[tuple[int, int]]]]:
    """Yield functions, of which each gives (row, digest) of the rows of one part.

    A part has the digests with the same remainder, so that equal digests are in the same part, and none has many.
    """
    # Of 2 parts the first has the even digests, the second the odd ones.
    num_parts = 1 + len(digests) // _MOST_OF_A_PART
    for part in range(num_parts):
        yield partial(_rows_of_part, part, num_parts)


def _rows_of_part(
    part: int,
    num_parts: int,
    digests: array[int],
) -> Iterator[tuple[int, int]]:
    for row, digest in enumerate(digests):
        if digest % num_parts == part:
            yield row, digest


class RowWatch:
    """Keeps what tells rows from each other.

    Give it every result of `encode_batches`; `facts` says then what they have in common.
    """

    def __init__(
        self,
        model: ModelConfig,
        sources: Mapping[Split, Sequence[SourceConfig]],
        labels: Labels | None,
    ) -> None:
        self._sources = sources
        self._labels = labels
        self._seen: dict[Split, _SeenRows] = {split: _SeenRows() for split in sources}
        # Ids that the model has embeddings for; None where its shapes are not on this machine.
        embeddings = embeddings_of(model, os.environ)
        self._known_ids = embeddings.known if embeddings is not None else None

    def add(self, result: BatchResult) -> None:
        """Note the rows of one batch."""
        seen = self._seen[result.split]
        chunk = result.chunk
        seen.digests.extend(result.digests)
        seen.reversed_digests.extend(result.reversed_digests)
        seen.sources.extend([result.source] * len(chunk.rows))
        seen.records.extend(chunk.rows)

        seen.longest = max(seen.longest, _longest(chunk))
        seen.largest_id = max(seen.largest_id, result.largest_id)
        # Only where a batch has such an id, its rows are looked at one by one.
        if self._known_ids is not None and result.largest_id >= self._known_ids:
            seen.unknown += _rows_beyond(chunk, self._known_ids)

        for names in labels_of(self._labels, chunk):
            seen.classes.update(names)

    def facts(self, split: Split) -> JsonObject:
        """Return what was seen of a split, as JSON, to be kept beside the counts of its records.

        Places are pairs of a source's index and a record's.
        """
        seen = self._seen[split]
        facts: JsonObject = {
            "longest_kept": seen.longest,
            "largest_id": seen.largest_id,
            "unknown_ids": {"known": self._known_ids, "rows": seen.unknown},
            "classes": self._classes(seen),
            "number_marks": self._number_marks(seen),
            "available": [_available(source) for source in self._sources[split]],
            **seen.repeats(),
        }
        if split != "train":
            facts["in_train"] = self._in_train(split)
        return facts

    def _classes(self, seen: _SeenRows) -> dict[str, int]:
        """Return the rows of each class, also of those without any; nothing where labels are numbers."""
        if self._labels is None or self._labels.problem_type == "regression":
            return {}
        return {name: seen.classes[name] for name in self._labels.names}

    def _number_marks(self, seen: _SeenRows) -> dict[str, int]:
        """Return the rows whose number to predict marks a missing one, by this number; nothing for classes."""
        if self._labels is None or self._labels.problem_type != "regression":
            return {}
        return marks_among_numbers(seen.classes)

    def _in_train(self, split: Split) -> JsonObject:
        """Return the number of rows of a split that are in train too, and of those that are the same records."""
        seen = self._seen[split]
        train = self._seen["train"]

        # 1. Rows by their digests.
        both: list[int] = []
        for part in _parts_of(train.digests):
            in_train = {digest for _, digest in part(train.digests)}
            for row, digest in part(seen.digests):
                if digest in in_train:
                    both.append(row)

        # 2. Records that two ranges of one file both take. These say more: the ranges overlap.
        same = 0
        for index, source in enumerate(self._sources[split]):
            for other_index, other in enumerate(self._sources["train"]):
                if _input_of(source) == _input_of(other):
                    same += len(seen.records_of(index) & train.records_of(other_index))

        return {
            "rows": len(both),
            "same_records": same,
            "places": seen.places(both),
        }


def _input_of(source: SourceConfig) -> tuple[Any, ...]:
    """Return what decides which records a source has, before a part of them is taken."""
    located = locate(source)
    # Two names of one file, such as a link, are the same input.
    files = tuple(file.resolve() for file in located.files)
    return (files,) if files else (located.path, source.subset, source.split)


def _available(source: SourceConfig) -> int | None:
    """Return the number of records that a part is taken of; None where all are taken."""
    if source.range is None and locate(source).sample is None:
        return None
    return count_rows(source)


def _longest(chunk: Chunk) -> int:
    """Return the tokens of the longest sequence. A row with a split has two: a pair of answers."""
    longest = 0
    for length, split in zip(chunk.lengths, chunk.splits, strict=True):
        longest = max(longest, split, length - split)
    return longest


def _rows_beyond(chunk: Chunk, known: int) -> int:
    """Return how many rows hold an id that is not below `known`."""
    number = 0
    begin = 0
    for length in chunk.lengths:
        number += max(chunk.tokens[begin : begin + length], default=-1) >= known
        begin += length
    return number


def labels_of(labels: Labels | None, chunk: Chunk) -> Iterator[list[str]]:
    """Yield the label of each row, in words: names of classes, or a number. Nothing where tokens are the labels."""
    # `targets` has as many numbers for each row: one, or one for every class where several may apply.
    width = len(chunk.targets) // max(1, len(chunk.lengths))
    for row in range(len(chunk.lengths)):
        if labels is None:
            yield []
            continue
        name = labels.name(chunk.targets[row * width : (row + 1) * width])
        if isinstance(name, float):
            name = f"{name:g}"
        yield name if isinstance(name, list) else [name]
