"""Prepared rows, written end to end. Imports no numpy, so that a check of the data starts fast.

A folder of `rows` rows with `tokens` tokens in all holds these arrays. Here are two rows of 3 and 2 tokens, of which
one and two are labels:

    tokens.u32   [tokens]    11 12 13 21 22
    trained.u8   [tokens]     0  0  1  1  1    1 for a label
    offsets.i64  [rows + 1]   0  3  5          where each row begins, and the end
    labels.u32   [rows]       1  2             labels in each row
    source.u16   [rows]       0  0             which source of the split the row is from
    row.u32      [rows]       0  1             which record of the source it was made from

Some kinds of records have more (FILES_OF_KIND):

    targets.f32  [rows, width]  a classifier's labels; by how much a pair's chosen answer is better (width 1); 1 for a
                                good judged answer, 0 for a bad one
    segments.u8  [tokens]       a classifier's token types
    splits.u32   [rows]         a pair is one row: where in it the rejected answer's sequence begins

Where a task may have images, a table of all images, row after row:

    images.i64        [rows + 1]    the first image of each row, and the end
    image_crcs.u32    [images]
    image_paths.utf8  [bytes]       paths end to end
    image_paths.i64   [images + 1]  where each path begins, and the end
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kubetune.config.schema import RecordKind
    from kubetune.data.reading.images import ImageRef
    from kubetune.data.text.encode import Encoded

FILES: Final = {
    "tokens": "tokens.u32",
    "trained": "trained.u8",
    "offsets": "offsets.i64",
    "labels": "labels.u32",
    "source": "source.u16",
    "row": "row.u32",
}
EXTRA_FILES: Final = {
    "targets": "targets.f32",
    "segments": "segments.u8",
    "splits": "splits.u32",
}
# Those of EXTRA_FILES that rows have, by the kind of record that they were made of.
FILES_OF_KIND: Final[dict[str, tuple[str, ...]]] = {
    "text": (),
    "labelled": ("targets", "segments"),
    "pair": ("splits",),
    "graded": ("splits", "targets"),
    "judged": ("targets",),
    "prompt": (),
}
PICTURED_FILES: Final = {
    "images": "images.i64",
    "image_crcs": "image_crcs.u32",
    "image_paths": "image_paths.utf8",
    "image_path_offsets": "image_paths.i64",
}


@dataclass
class Chunk:
    """Some encoded rows on their way from the process that made them to the file: raw arrays, cheap to send.

    `tokens`, `trained` and `segments` of all rows lie end to end, the others have one entry a row.
    """

    tokens: array[int] = field(default_factory=lambda: array("I"))
    trained: bytearray = field(default_factory=bytearray)
    lengths: array[int] = field(default_factory=lambda: array("I"))
    labels: array[int] = field(default_factory=lambda: array("I"))
    rows: array[int] = field(default_factory=lambda: array("I"))
    targets: array[float] = field(default_factory=lambda: array("f"))
    segments: bytearray = field(default_factory=bytearray)
    splits: array[int] = field(default_factory=lambda: array("I"))
    images: list[tuple[ImageRef, ...]] = field(default_factory=list)

    def add(self, row: int, encoded: Encoded) -> None:
        """Append one row; `row` is its index in its source."""
        self.tokens.extend(encoded.ids)
        self.trained += bytes(encoded.trained)
        self.lengths.append(len(encoded.ids))
        self.labels.append(encoded.labels)
        self.targets.extend(encoded.target)
        self.segments += bytes(encoded.segments)
        self.splits.append(encoded.split)
        self.rows.append(row)
        self.images.append(encoded.images)

    def sequences(self) -> Iterator[list[tuple[list[int], bytes]]]:
        """Yield the sequences of each row, two of a pair: their ids, and a 1 for each that is trained, else a 0."""
        begin = 0
        for length, split in zip(self.lengths, self.splits, strict=True):
            # In a pair, the rejected sequence follows the chosen one.
            borders = [begin, begin + split, begin + length] if split else [begin, begin + length]
            begin += length
            yield [
                (self.tokens[i:j].tolist(), bytes(self.trained[i:j])) for i, j in pairwise(borders)
            ]


class RowWriter:
    """Writes the rows of one split into a new folder, in the order they come."""

    def __init__(
        self,
        folder: Path,
        kind: RecordKind,
        *,
        pictured: bool = False,
    ) -> None:
        folder.mkdir()
        self._extra = FILES_OF_KIND[kind]
        self._pictured = pictured
        names = dict(FILES)
        for name in self._extra:
            names[name] = EXTRA_FILES[name]
        if pictured:
            names |= PICTURED_FILES
        self._files = {name: open(folder / file, "xb") for name, file in names.items()}  # noqa: SIM115

        # How much was written so far: tokens, images, and bytes of paths.
        self._end = 0
        self._images_end = 0
        self._paths_end = 0

        # Files of offsets have one number more than rows: they begin with 0.
        zero = array("q", [0]).tobytes()
        self._files["offsets"].write(zero)
        if pictured:
            self._files["images"].write(zero)
            self._files["image_path_offsets"].write(zero)

    def write(self, source: int, chunk: Chunk) -> None:
        """Append rows of the source with this index."""
        # Lengths 3 2 after 5 tokens that are written already become the offsets 8 10.
        offsets = array("q")
        for length in chunk.lengths:
            self._end += length
            offsets.append(self._end)
        self._files["offsets"].write(offsets.tobytes())
        self._files["tokens"].write(chunk.tokens.tobytes())
        self._files["trained"].write(chunk.trained)
        self._files["labels"].write(chunk.labels.tobytes())
        self._files["source"].write(array("H", [source]).tobytes() * len(chunk.rows))
        self._files["row"].write(chunk.rows.tobytes())
        for name in self._extra:
            self._files[name].write(memoryview(getattr(chunk, name)))
        if self._pictured:
            self._write_images(chunk)

    def _write_images(self, chunk: Chunk) -> None:
        # A table of images: `row_ends` counts images, `path_ends` bytes of their paths.
        row_ends = array("q")
        path_ends = array("q")
        crcs = array("I")
        for images in chunk.images:
            self._images_end += len(images)
            row_ends.append(self._images_end)
            for image in images:
                path = os.fsencode(image.path)
                self._files["image_paths"].write(path)
                self._paths_end += len(path)
                path_ends.append(self._paths_end)
                crcs.append(image.crc)

        self._files["image_crcs"].write(crcs.tobytes())
        self._files["images"].write(row_ends.tobytes())
        self._files["image_path_offsets"].write(path_ends.tobytes())

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        # Every file is closed, also where an error came.
        for file in self._files.values():
            with file:
                # Rows that an error cut short are removed by whoever called: they need not reach the disk.
                if kind is None:
                    file.flush()
                    os.fsync(file.fileno())
