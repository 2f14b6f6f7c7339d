"""Log-probabilities of the rows of an export's proof, kept in the run directory: `exports/step-000120.proof.safetensors`.

They are those of the trained model, of its base, and of the trained model without its adapter on one group of modules at a
time, so that a server can be asked later whether it serves that model, where neither data nor base are.
They stay out of the export itself, which may become public: the rows are rows of the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kubetune import errors
from kubetune.base import files
from kubetune.data.prepared.kept_rows import split

if TYPE_CHECKING:
    from numpy.typing import NDArray

    LogProbabilities = NDArray[np.float32]

_SUFFIX: Final = ".proof.safetensors"
# Names of models. WITHOUT begins that of the trained model without its adapter on a group of modules.
TRAINED: Final = "trained"
BASE: Final = "base"
WITHOUT: Final = "without "


@dataclass(frozen=True)
class ProofAnswers:
    """What models answer to the rows."""

    ids: tuple[tuple[int, ...], ...]  # [rows][tokens]
    # Model -> [tokens - rows] of all rows end to end: the first token of a row has none. BASE is missing where the base
    # was not at hand.
    models: Mapping[str, LogProbabilities]
    eos_ids: tuple[int, ...]  # with which training ended answers

    def up_to(self, place: int) -> tuple[int, ...]:
        """Return the ids up to a token, and itself, by its place in the arrays."""
        for row in self.ids:
            if place < len(row) - 1:
                return row[: place + 2]
            place -= len(row) - 1
        raise IndexError(place)

    def at(self, tokens: Sequence[int], floors: Sequence[float]) -> ProofAnswers:
        """Return the answers at some tokens, by their places in the arrays, each at least its floor."""
        models = {}
        for name, values in self.models.items():
            models[name] = np.maximum(values[list(tokens)], np.array(floors, np.float32))
        return replace(self, models=models)


def path_of(run_dir: Path, checkpoint: str) -> Path:
    """Return the file of a checkpoint. `checkpoint`: such as `step-000120`."""
    return run_dir / "exports" / f"{checkpoint}{_SUFFIX}"


def newest(run_dir: Path) -> Path | None:
    """Return the file of the highest step, None if there is none."""
    # Steps have six digits in names, so the last name is that of the newest step.
    paths = sorted((run_dir / "exports").glob(f"step-*{_SUFFIX}"))
    return paths[-1] if paths else None


def write(path: Path, answers: ProofAnswers, run_dir: Path) -> None:
    """Write the file. Raise EnvironmentFault for a full disk."""
    from safetensors.numpy import save

    arrays: dict[str, NDArray[Any]] = {
        **answers.models,
        "lengths": np.array([len(row) for row in answers.ids], np.int64),
        "ids": np.concatenate([np.array(row, np.int64) for row in answers.ids]),
        "eos_ids": np.array(answers.eos_ids, np.int64),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomic(path, save(arrays), within=run_dir)


def read(path: Path) -> ProofAnswers:
    """Return what a file holds. Raise EnvironmentFault if it is damaged, or holds what no run keeps."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return _answers(load_file(path))
    except (SafetensorError, ValueError, KeyError, TypeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise errors.EnvironmentFault(
            f"{path} is damaged ({reason}); remove it, and `kubetune export` writes it again"
        ) from error


def _answers(arrays: dict[str, NDArray[Any]]) -> ProofAnswers:
    """Return the arrays of a file as answers. Raise ValueError if they do not fit each other, KeyError if one is missing."""
    lengths = arrays.pop("lengths")
    ids = arrays.pop("ids")
    eos_ids = arrays.pop("eos_ids")
    rows = tuple(tuple(row.tolist()) for row in split(ids, lengths))
    if min(map(len, rows), default=0) < 1 or ids.min() < 0:
        raise ValueError("rows of at least one id expected")
    for name, values in {TRAINED: arrays[TRAINED], **arrays}.items():
        if values.dtype != np.float32 or values.shape != (len(ids) - len(rows),):
            raise ValueError(f"{name}: {values.dtype} {list(values.shape)} found")
    return ProofAnswers(rows, arrays, tuple(eos_ids.tolist()))


def joined(rows: Sequence[Sequence[float]]) -> LogProbabilities:
    """Return log-probabilities of rows end to end."""
    return np.concatenate([np.array(row, np.float32) for row in rows])
