"""Prepared rows, read through memory maps. row_writer.py writes them and says what the files hold."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kubetune.data.order import shuffled
from kubetune.data.prepared.row_writer import EXTRA_FILES, FILES, PICTURED_FILES
from kubetune.data.reading.images import ImageRef

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kubetune.data.vision.image_processor import ImageProcessor

    # Ids of a sequence, and of each token whether it is a label. Both are [tokens].
    TrainedIds = tuple[NDArray[np.uint32], NDArray[np.bool_]]

# Numbers read at once from a file that is read through.
_PART: Final = 2**18

# Types of the numbers in the files, without the byte order, which is the machine's.
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


class _ImageTable(NamedTuple):
    """The images of all rows, row after row."""

    # [rows + 1] the first image of each row, and the end
    firsts: NDArray[np.int64]
    # [images]
    crcs: NDArray[np.uint32]
    # bytes of all paths, end to end
    paths: NDArray[np.uint8]
    # [images + 1] where each path begins, and the end
    path_offsets: NDArray[np.int64]

    def of_row(self, index: int) -> tuple[ImageRef, ...]:
        """Return the images of a row."""
        images = []
        for i in range(self.firsts[index], self.firsts[index + 1]):
            # Paths are bytes: a file system may have names that are no UTF-8.
            path = self.paths[self.path_offsets[i] : self.path_offsets[i + 1]].tobytes()
            images.append(ImageRef(os.fsdecode(path), int(self.crcs[i])))
        return tuple(images)


class Rows:
    """The rows of one split. Each file is mapped when it is first asked for.

    `weights` `[sources]`: how often each epoch uses the rows of a source. `names` `[sources]`, where sources are told
    apart. `processor`: for images, if rows may have any.
    """

    def __init__(
        self,
        folder: Path,
        weights: Sequence[float],
        processor: ImageProcessor | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.names = tuple(names)
        self.processor = processor
        self.weights = tuple(weights)
        # Log-probabilities of both answers under the model before its first step, [rows, 2]; training computes them.
        self.reference: NDArray[np.float64] | None = None
        # What a teacher says of each label, `[labels of all rows, numbers]`.
        self.teacher: NDArray[np.float32] | None = None

    def _map(self, name: str) -> NDArray[Any]:
        """Return a file as an array. Its pages are read when they are used, and shared by all ranks of a node."""
        file = self.folder / (FILES | EXTRA_FILES | PICTURED_FILES)[name]
        if not file.stat().st_size:
            return np.empty(0, _DTYPES[name])  # an empty file cannot be mapped
        # A plain view: slices of a memmap cost several times what slices of an array do.
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
        """The place in `tokens` at which each row begins, and the end, `[rows + 1]`."""
        return self._map("offsets")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, `[rows]`."""
        return np.diff(self.offsets)

    @cached_property
    def largest_id(self) -> int:
        """The largest token id of all rows, -1 if there is none."""
        largest = -1
        # Read, not mapped: pages of a map would count as memory of the run.
        with (self.folder / FILES["tokens"]).open("rb") as file:
            while len(part := np.fromfile(file, _DTYPES["tokens"], _PART)):
                largest = max(largest, int(part.max()))
        return largest

    @cached_property
    def trained_counts(self) -> NDArray[np.int64]:
        """Labels of each row, `[rows]`."""
        return self._map("labels").astype(np.int64)

    @cached_property
    def _label_ends(self) -> NDArray[np.int64]:
        return np.cumsum(self.trained_counts)

    def label_places(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places of the labels of some rows among those of all rows, row after row."""
        places = [np.empty(0, np.int64)]
        for row in ids:
            end = self._label_ends[row]
            places.append(np.arange(end - self.trained_counts[row], end, dtype=np.int64))
        return np.concatenate(places)

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
        """The value to be predicted for a row as a whole, `[rows, width]`; None for kinds of records without that.

        A classifier's labels as its loss wants them; by how much a pair's chosen answer is better; 1 for a judged
        answer that is good, 0 for a bad one.
        """
        if not (self.folder / EXTRA_FILES["targets"]).exists():
            return None
        return self._map("targets").reshape(len(self), -1)

    @cached_property
    def splits(self) -> NDArray[np.uint32] | None:
        """The place in each row at which its second sequence begins, `[rows]`; None if every row is one sequence."""
        if not (self.folder / EXTRA_FILES["splits"]).exists():
            return None
        return self._map("splits")

    @property
    def is_labelled(self) -> bool:
        """True for a classifier's rows, which have token types."""
        return (self.folder / EXTRA_FILES["segments"]).exists()

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        if self.splits is None:
            return int(self.lengths.max(initial=0))
        # A row is two sequences: `splits` tokens, and the others.
        second = self.lengths - self.splits
        return int(np.maximum(self.splits, second).max(initial=0))

    @cached_property
    def _segments(self) -> NDArray[np.uint8]:
        return self._map("segments")

    def segments(self, index: int) -> NDArray[np.uint8]:
        """Return the token types of a labelled row: 1 for the second text of a pair."""
        return self._segments[self.offsets[index] : self.offsets[index + 1]]

    @cached_property
    def _images(self) -> _ImageTable:
        return _ImageTable(*(self._map(name) for name in PICTURED_FILES))

    def images(self, index: int) -> tuple[ImageRef, ...]:
        """Return the images of a row, in the order of their tokens."""
        return self._images.of_row(index)

    @property
    def image_digest(self) -> int:
        """A number that changes when the bytes of an image do."""
        return zlib.crc32(self._images.crcs.tobytes())

    def row(self, index: int) -> TrainedIds:
        """Return the ids of a row, and of each token whether it is a label."""
        # Views, not copies: a row is read from the disk when it is used.
        start = self.offsets[index]
        end = self.offsets[index + 1]
        return self.tokens[start:end], self._trained[start:end]

    @cached_property
    def _others(self) -> NDArray[np.int64] | None:
        """For each judged row, the row whose answer it is compared with, `[rows]`; None for other kinds of rows.

        A random cycle through all rows, so that none gets its own answer if there are two or more.
        """
        # Only judged answers have targets, but neither token types nor second sequences.
        is_judged = self.targets is not None and not self.is_labelled and self.splits is None
        if not is_judged:
            return None
        # Of four rows in the order 2 0 3 1, row 0 gets the answer of 2, 3 that of 0, 1 that of 3, and 2 that of 1.
        order = shuffled(np.arange(len(self)), "unrelated answers")
        others = np.empty(len(self), np.int64)
        others[order] = np.roll(order, 1)
        return others

    @property
    def sequences_per_row(self) -> int:
        """Sequences that go through the model for a row."""
        if self.splits is None and self._others is None:
            return 1
        return 2

    def sequences(self, index: int) -> tuple[TrainedIds, ...]:
        """Return the sequences of a row: of each its ids, and of each token whether it is a label.

        Of a pair: with the chosen answer, and with the rejected. Of a judged row: with its answer, and its prompt
        with the answer of another row. Of other rows: one sequence.
        """
        ids, trained = self.row(index)
        if self._others is not None:
            other = self.row(int(self._others[index]))
            return (ids, trained), _with_answer_of((ids, trained), other, self.longest)
        if self.splits is not None:
            split = int(self.splits[index])
            return (ids[:split], trained[:split]), (ids[split:], trained[split:])
        return ((ids, trained),)

    def ids_of_sequences(self, index: int) -> list[NDArray[np.uint32]]:
        """Return the ids of each sequence of a row."""
        return [ids for ids, _ in self.sequences(index)]


def count_holding(rows: Rows, smallest: int) -> int:
    """Return the number of rows that hold an id of at least `smallest`."""
    count = 0
    for index in range(len(rows)):
        ids, _ = rows.row(index)
        if (ids >= smallest).any():
            count += 1
    return count


def _with_answer_of(row: TrainedIds, other: TrainedIds, longest: int) -> TrainedIds:
    """Return a row's prompt with the answer of another row, as far as it fits the longest sequence."""
    #     row    P P a        other    Q b b b        longest 4
    #     result P P b b      the last b is cut off
    ids, trained = row
    other_ids, other_trained = other
    prompt = int(trained.argmax())  # tokens before the first label
    start = int(other_trained.argmax())
    answer = slice(start, start + longest - prompt)
    return (
        np.concatenate([ids[:prompt], other_ids[answer]]),
        np.concatenate([trained[:prompt], other_trained[answer]]),
    )
