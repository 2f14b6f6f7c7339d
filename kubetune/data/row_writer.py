"""Prepared rows, written as one stream. Imports no numpy, so that checking data starts fast.

A folder holds `tokens.u32` and `trained.u8` (all rows end to end), `offsets.i64` (`[rows + 1]`, where each begins),
`labels.u32` (labels in each row), and `source.u16` and `row.u32` (the source, and the record in it, that each is of).
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final

FILES: Final = {
    "tokens": "tokens.u32",
    "trained": "trained.u8",
    "offsets": "offsets.i64",
    "labels": "labels.u32",
    "source": "source.u16",
    "row": "row.u32",
}


@dataclass
class Chunk:
    """Some encoded rows on their way from the process that made them to the file: raw arrays, cheap to send."""

    tokens: array[int] = field(default_factory=lambda: array("I"))
    trained: bytearray = field(default_factory=bytearray)
    lengths: array[int] = field(default_factory=lambda: array("I"))
    labels: array[int] = field(default_factory=lambda: array("I"))
    rows: array[int] = field(default_factory=lambda: array("I"))

    def add(self, row: int, ids: Sequence[int], trained: Sequence[bool]) -> None:
        """Append one row; `row` is its index in its source."""
        self.tokens.extend(ids)
        self.trained += bytes(trained)
        self.lengths.append(len(ids))
        self.labels.append(sum(trained))
        self.rows.append(row)


class RowWriter:
    """Writes the rows of one split into a new folder, in the order they come."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._files = {name: open(folder / file, "xb") for name, file in FILES.items()}  # noqa: SIM115
        self._end = 0
        self._files["offsets"].write(array("q", [0]).tobytes())

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

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        for file in self._files.values():
            with file:
                if kind is None:
                    file.flush()
                    os.fsync(file.fileno())
