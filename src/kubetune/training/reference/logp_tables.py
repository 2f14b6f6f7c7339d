"""Tables of log-probabilities on disk. Every run on the same data and the same model finds them beside the prepared data.

DATA.reference-3c4d.npz       train [rows, 2], eval [rows, 2]; written when all is done
DATA.reference-3c4d.parts/    until then: one file for each part that is done
    5e6f.npz                        train.ids [2, 0, 5], train [3, 2]: the results of rows 2, 0 and 5

A teacher's tables are wider, with a line for each label in place of each row.
"""

from __future__ import annotations

import uuid
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kubetune.base import files
from kubetune.data.order import Ids

# Split -> log-probabilities of the two answers of each row, [rows, 2], or numbers of each label; NaN: still unknown.
Tables = dict[str, NDArray[Any]]


class UnitAnswers(NamedTuple):
    """What a model says of a unit, rows that are run together."""

    split: str
    lines: Ids  # of the table: the rows, or their labels
    values: NDArray[Any]  # [lines, numbers]


def read_tables(path: Path, expected: Mapping[str, tuple[int, ...]]) -> Tables | None:
    """Return the tables in a file, None if one is missing or incomplete. `expected`: the shape of each."""
    tables = _load(path)
    # Other shapes are those of other data, or of a file that is cut off.
    shapes = {split: table.shape for split, table in tables.items()}
    if shapes != expected:
        return None
    return tables


def take_up(part: Path, tables: Tables) -> None:
    """Copy the rows of a part into the tables."""
    arrays = _load(part)
    for split, table in tables.items():
        # A part may hold rows of one split alone.
        if split in arrays:
            table[arrays[f"{split}.ids"]] = arrays[split]


def write_part(parts: Path, units: Sequence[UnitAnswers]) -> None:
    """Write the file of a part, in the form that the top of this module shows."""
    # Units of no rows were only there to keep ranks together.
    by_split: dict[str, list[UnitAnswers]] = {}
    for unit in units:
        if len(unit.lines):
            by_split.setdefault(unit.split, []).append(unit)

    arrays: dict[str, NDArray[Any]] = {}
    for split, of_split in by_split.items():
        arrays[f"{split}.ids"] = np.concatenate([unit.lines for unit in of_split])
        arrays[split] = np.concatenate([unit.values for unit in of_split])
    write_tables(parts / f"{uuid.uuid4().hex}.npz", arrays)


def write_tables(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write a file, whole or not at all."""
    # Not by way of bytes in memory: a teacher's tables have gigabytes.
    with files.written_whole(path) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def _load(path: Path) -> Tables:
    """Return the arrays of a file; none if it does not exist or is damaged."""
    try:
        # Without pickle, so a file cannot run code.
        with np.load(path) as arrays:
            return dict(arrays)
    except (OSError, ValueError, zipfile.BadZipFile, EOFError):
        return {}
