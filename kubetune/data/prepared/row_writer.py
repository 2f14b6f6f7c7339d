"""Prepared rows, written end to end. Imports no numpy, so that checking data starts fast.

A folder holds `tokens.u32` and `trained.u8` (all rows end to end), `offsets.i64` (`[rows + 1]`, where each begins),
`labels.u32` (labels in each row), and `source.u16` and `row.u32` (the source, and the record in it, that each is of).
Labelled rows also have `targets.f32` (`[rows, width]`, what each is to be told as) and `segments.u8` (token types).
Pairs of answers are one row each, and also have `splits.u32` (`[rows]`, where in it the second sequence, the rejected
answer, begins); a reward model's have `targets.f32` (`[rows, 1]`, by how much the first is better). Judged answers have
`targets.f32` (`[rows, 1]`, 1 for a good one, 0 for a bad one).
Rows of a task with images also have these in one table, row after row: `images.i64` (`[rows + 1]`, the first image of
each row), `image_crcs.u32`, `image_paths.utf8` (end to end) and `image_paths.i64` (`[images + 1]`, where each begins).
"""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kubetune.config.schema import RecordKind
    from kubetune.data.text.encode import Encoded
    from kubetune.data.vision.image_processor import ImageRef

FILES: Final = {
    "tokens": "tokens.u32",
    "trained": "trained.u8",
    "offsets": "offsets.i64",
    "labels": "labels.u32",
    "source": "source.u16",
    "row": "row.u32",
}
EXTRA_FILES: Final = {"targets": "targets.f32", "segments": "segments.u8", "splits": "splits.u32"}
FILES_OF_KIND: Final[dict[str, tuple[str, ...]]] = {
    "text": (),
    "labelled": ("targets", "segments"),
    "pair": ("splits",),
    "graded": ("splits", "targets"),
    "judged": ("targets",),
}
"""Those of EXTRA_FILES that rows have, by the kind of record that they are made of."""
PICTURED_FILES: Final = {
    "images": "images.i64",
    "image_crcs": "image_crcs.u32",
    "image_paths": "image_paths.utf8",
    "image_path_offsets": "image_paths.i64",
}


@dataclass
class Chunk:
    """Some encoded rows on their way from the process that made them to the file: raw arrays, cheap to send."""

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


class RowWriter:
    """Writes the rows of one split into a new folder, in the order they come."""

    def __init__(self, folder: Path, kind: RecordKind, *, pictured: bool = False) -> None:
        folder.mkdir()
        self._extra, self._pictured = FILES_OF_KIND[kind], pictured
        names = (
            FILES
            | {name: EXTRA_FILES[name] for name in self._extra}
            | (PICTURED_FILES if pictured else {})
        )
        self._files = {name: open(folder / file, "xb") for name, file in names.items()}  # noqa: SIM115
        self._end = self._images_end = self._paths_end = 0
        for name in ("offsets", *(("images", "image_path_offsets") if pictured else ())):
            self._files[name].write(array("q", [0]).tobytes())

    def write(self, source: int, chunk: Chunk) -> None:
        """Append rows of the source with this index."""
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
        firsts, ends = array("q"), array("q")
        for images in chunk.images:
            self._images_end += len(images)
            firsts.append(self._images_end)
            for image in images:
                path = os.fsencode(image.path)
                self._files["image_paths"].write(path)
                self._paths_end += len(path)
                ends.append(self._paths_end)
        crcs = array("I", [image.crc for images in chunk.images for image in images])
        self._files["image_crcs"].write(crcs.tobytes())
        self._files["images"].write(firsts.tobytes())
        self._files["image_path_offsets"].write(ends.tobytes())

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        for file in self._files.values():
            with file:
                if kind is None:
                    file.flush()
                    os.fsync(file.fileno())
