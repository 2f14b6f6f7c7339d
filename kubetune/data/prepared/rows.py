"""Prepared rows, read through memory maps. row_writer.py writes them and says what the files hold."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kubetune.data.prepared.order import hash_ids
from kubetune.data.prepared.row_writer import EXTRA_FILES, FILES, PICTURED_FILES
from kubetune.data.vision.image_processor import ImageRef

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kubetune.data.vision.image_processor import ImageProcessor

_PART: Final = 2**18
"""Numbers that are read at once where all of them are looked through."""

_DTYPES: Final = {
    "tokens": "u4",
    "trained": "u1",
    "offsets": "i8",
    "labels": "u4",
    "source": "u2",
    "row": "u4",
    "targets": "f4",
    "segments": "u1",
    "splits": "u4",
    "images": "i8",
    "image_crcs": "u4",
    "image_paths": "u1",
    "image_path_offsets": "i8",
}


class Rows:
    """The rows of one split. Nothing is read before it is asked for.

    `weights[s]` says how often each epoch has the rows of source s; `processor` is for images, where rows may have
    any; `names` are the sources', where they are told apart. `reference`: what training finds before its first step,
    the log-probability of both answers of each row under the model as it is then, `[rows, 2]`.
    """

    def __init__(
        self,
        folder: Path,
        weights: Sequence[float],
        processor: ImageProcessor | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self.folder, self.names = folder, tuple(names)
        self.processor = processor
        self.weights = tuple(weights)
        self.reference: NDArray[np.float64] | None = None

    def _map(self, name: str) -> NDArray[Any]:
        file = self.folder / (FILES | EXTRA_FILES | PICTURED_FILES)[name]
        if not file.stat().st_size:
            return np.empty(0, _DTYPES[name])  # an empty file cannot be mapped
        return np.memmap(file, _DTYPES[name], "r").view(np.ndarray)

    @cached_property
    def tokens(self) -> NDArray[np.uint32]:
        """Ids of all rows end to end."""
        return self._map("tokens")

    @cached_property
    def _trained(self) -> NDArray[np.bool_]:
        return self._map("trained").view(np.bool_)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Places in `tokens` at which rows begin, and the end, `[rows + 1]`."""
        return self._map("offsets")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, `[rows]`."""
        return np.diff(self.offsets)

    @cached_property
    def largest_id(self) -> int:
        """The largest id of a token in any row; -1 where there is none."""
        largest = -1
        with (self.folder / FILES["tokens"]).open(
            "rb"
        ) as file:  # what is mapped would count as memory of the run
            while len(part := np.fromfile(file, _DTYPES["tokens"], _PART)):
                largest = max(largest, int(part.max()))
        return largest

    def count_holding(self, smallest: int) -> int:
        """Number of rows that hold an id of at least `smallest`."""
        return sum(bool((self.row(index)[0] >= smallest).any()) for index in range(len(self)))

    @cached_property
    def trained_counts(self) -> NDArray[np.int64]:
        """Labels of each row, `[rows]`."""
        return self._map("labels").astype(np.int64)

    @cached_property
    def source(self) -> NDArray[np.uint16]:
        """Index of the source of each row, `[rows]`."""
        return self._map("source")

    @cached_property
    def record(self) -> NDArray[np.uint32]:
        """Index of each row's record in its source, from 0, `[rows]`."""
        return self._map("row")

    @cached_property
    def targets(self) -> NDArray[np.float32] | None:
        """Numbers that rows have themselves, `[rows, width]`; None where they have none.

        Labels of a classifier as its loss wants them; by how much the chosen answer of a pair is better; 1 for a judged
        answer that is good, 0 for a bad one.
        """
        if not (self.folder / EXTRA_FILES["targets"]).exists():
            return None
        return self._map("targets").reshape(len(self), -1)

    @cached_property
    def splits(self) -> NDArray[np.uint32] | None:
        """Beginnings of the second sequences in their rows, `[rows]`; None where every row is one sequence."""
        return self._map("splits") if (self.folder / EXTRA_FILES["splits"]).exists() else None

    @property
    def is_labelled(self) -> bool:
        """A property of a classifier's rows: they have targets and token types."""
        return (self.folder / EXTRA_FILES["segments"]).exists()

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        if self.splits is None:
            return int(self.lengths.max(initial=0))
        return int(np.maximum(self.splits, self.lengths - self.splits).max(initial=0))

    @cached_property
    def _segments(self) -> NDArray[np.uint8]:
        return self._map("segments")

    def segments(self, index: int) -> NDArray[np.uint8]:
        """Token types of a labelled row: 1 for the second text of a pair."""
        return self._segments[self.offsets[index] : self.offsets[index + 1]]

    @cached_property
    def _images(
        self,
    ) -> tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.uint8], NDArray[np.int64]]:
        first, crcs, paths, offsets = (self._map(name) for name in PICTURED_FILES)
        return first, crcs, paths, offsets

    def images(self, index: int) -> tuple[ImageRef, ...]:
        """The images of a row, in the order of their tokens."""
        first, crcs, paths, offsets = self._images
        return tuple(
            ImageRef(os.fsdecode(paths[offsets[i] : offsets[i + 1]].tobytes()), int(crcs[i]))
            for i in range(first[index], first[index + 1])
        )

    @property
    def image_digest(self) -> int:
        """A number that is another where the bytes of an image are others."""
        return zlib.crc32(self._images[1].tobytes())

    def row(self, index: int) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
        """Ids of a row, and for each of them whether it is a label."""
        start, end = self.offsets[index], self.offsets[index + 1]
        return self.tokens[start:end], self._trained[start:end]

    @cached_property
    def _others(self) -> NDArray[np.int64] | None:
        """Of judged rows, for each another one, in an order that has nothing to do with theirs, `[rows]`."""
        if self.targets is None or self.is_labelled or self.splits is not None:
            return None
        order = np.argsort(hash_ids(np.arange(len(self)), "unrelated answers"), kind="stable")
        others = np.empty(len(self), np.int64)
        others[order] = np.roll(order, 1)
        return others

    @property
    def sequences_per_row(self) -> int:
        """Sequences that go through the model for a row."""
        return 1 if self.splits is None and self._others is None else 2

    def sequences(self, index: int) -> tuple[tuple[NDArray[np.uint32], NDArray[np.bool_]], ...]:
        """Ids of each sequence of a row, and whether they are labels: of a pair, the chosen answer and the rejected;
        of a judged row, its answer, and that of another row to the same question."""
        ids, trained = self.row(index)
        if self._others is not None:
            start, (other, is_label) = int(trained.argmax()), self.row(int(self._others[index]))
            answer = slice(int(is_label.argmax()), int(is_label.argmax()) + self.longest - start)
            mixed = (
                np.concatenate([ids[:start], other[answer]]),
                np.concatenate([trained[:start], is_label[answer]]),
            )
            return (ids, trained), mixed
        if self.splits is None:
            return ((ids, trained),)
        split = int(self.splits[index])
        return (ids[:split], trained[:split]), (ids[split:], trained[split:])

    def ids_of_sequences(self, index: int) -> list[NDArray[np.uint32]]:
        """Ids of each sequence of a row."""
        return [ids for ids, _ in self.sequences(index)]
