"""Prepared rows on disk: written as one stream, read through memory maps.

A folder holds `tokens.u32` and `trained.u8` (all rows end to end), `offsets.i64` (`[rows + 1]`, where each begins),
`labels.u32` (labels in each row), and `source.u16` and `row.u32` (where each came from).
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DTYPES: Final = {"tokens": "u4", "trained": "u1", "offsets": "i8", "labels": "u4", "source": "u2", "row": "u4"}
_FILES: Final = {
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
        self._files = {name: open(folder / file, "xb") for name, file in _FILES.items()}  # noqa: SIM115
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


class Rows:
    """The rows of one split. Nothing is read before it is asked for.

    `weights[s]` says how often each epoch has the rows of source s.
    """

    def __init__(self, folder: Path, weights: Sequence[float]) -> None:
        self.folder = folder
        self.weights = tuple(weights)

    def _map(self, name: str) -> NDArray[Any]:
        file = self.folder / _FILES[name]
        if not file.stat().st_size:
            return np.empty(0, _DTYPES[name])  # an empty file cannot be mapped
        return np.memmap(file, _DTYPES[name], "r").view(np.ndarray)

    @cached_property
    def _tokens(self) -> NDArray[np.uint32]:
        return self._map("tokens")

    @cached_property
    def _trained(self) -> NDArray[np.bool_]:
        return self._map("trained").view(np.bool_)

    @cached_property
    def _offsets(self) -> NDArray[np.int64]:
        return self._map("offsets")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, `[rows]`."""
        return np.diff(self._offsets)

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

    def row(self, index: int) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
        """Ids of a row, and for each of them whether it is a label."""
        start, end = self._offsets[index], self._offsets[index + 1]
        return self._tokens[start:end], self._trained[start:end]
