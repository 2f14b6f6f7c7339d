"""Log-probabilities of the rows of an export's proof, kept in the run directory: `exports/step-000120.proof.safetensors`.

They are those of the trained model, of its base, and of the trained model without its adapter on one group of modules at a
time, so that a server can be asked later whether it serves that model, where neither data nor base are.
They stay out of the export itself, which may become public: the rows are rows of the data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kubetune import errors
from kubetune.base import files

if TYPE_CHECKING:
    from numpy.typing import NDArray

    LogProbabilities = NDArray[np.float32]

_SUFFIX: Final = ".proof.safetensors"
# Before the name of a group of modules, in the names of arrays.
WITHOUT: Final = "without "


@dataclass(frozen=True)
class ProofAnswers:
    """What models answer to the rows. Log-probabilities of all rows lie end to end; the first token of a row has none."""

    ids: tuple[tuple[int, ...], ...]  # [rows][tokens]
    trained: LogProbabilities  # [tokens - rows]
    base: LogProbabilities | None = None  # None: the base was not at hand
    # Group of modules -> the trained model without its adapter on them.
    without: Mapping[str, LogProbabilities] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)  # `eos_ids`, `dtype`

    def models(self) -> dict[str, LogProbabilities]:
        """Return the log-probabilities by the names of their arrays."""
        arrays = {"trained": self.trained}
        if self.base is not None:
            arrays["base"] = self.base
        for group, values in self.without.items():
            arrays[WITHOUT + group] = values
        return arrays

    def up_to(self, place: int) -> tuple[int, ...]:
        """Return the ids up to a token, and itself, by its place in the arrays."""
        for row in self.ids:
            if place < len(row) - 1:
                return row[: place + 2]
            place -= len(row) - 1
        raise IndexError(place)

    def at(self, tokens: Sequence[int], floors: Sequence[float]) -> ProofAnswers:
        """Return the answers at some tokens, by their places in the arrays, each at least its floor."""

        def chosen(values: LogProbabilities) -> LogProbabilities:
            return np.maximum(values[list(tokens)], np.array(floors, np.float32))

        base = None if self.base is None else chosen(self.base)
        without = {part: chosen(values) for part, values in self.without.items()}
        return replace(self, trained=chosen(self.trained), base=base, without=without)


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
        name: values.astype(np.float32) for name, values in answers.models().items()
    }
    arrays["lengths"] = np.array([len(row) for row in answers.ids], np.int64)
    arrays["ids"] = np.concatenate([np.array(row, np.int64) for row in answers.ids])
    path.parent.mkdir(parents=True, exist_ok=True)
    content = save(arrays, {"facts": json.dumps(dict(answers.facts))})
    files.write_atomic(path, content, within=run_dir)


def read(path: Path) -> ProofAnswers:
    """Return what a file holds. Raise EnvironmentFault if it is damaged, or holds what no run keeps."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            facts = json.loads((file.metadata() or {}).get("facts", "{}"))
        return _answers(arrays, facts)
    except (SafetensorError, ValueError, KeyError, TypeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise errors.EnvironmentFault(
            f"{path} is damaged ({reason}); remove it, and `kubetune export` writes it again"
        ) from error


def _answers(arrays: dict[str, NDArray[Any]], facts: Any) -> ProofAnswers:
    """Return the arrays of a file as answers. Raise ValueError if they do not fit each other."""
    lengths = arrays.pop("lengths").tolist()
    ids = arrays.pop("ids").tolist()
    if not isinstance(facts, dict) or min(lengths, default=0) < 1 or sum(lengths) != len(ids):
        raise ValueError("lengths and ids do not fit each other")
    if min(ids) < 0:
        raise ValueError(f"an id is {min(ids)}")
    rows = []
    begin = 0
    for length in lengths:
        rows.append(tuple(ids[begin : begin + length]))
        begin += length
    for name, values in arrays.items():
        if values.dtype != np.float32 or values.shape != (len(ids) - len(rows),):
            raise ValueError(f"{name}: {values.dtype} {list(values.shape)} found")
    without = {}
    for name, values in arrays.items():
        if name.startswith(WITHOUT):
            without[name.removeprefix(WITHOUT)] = values
    return ProofAnswers(tuple(rows), arrays["trained"], arrays.get("base"), without, facts)


def joined(rows: Sequence[Sequence[float]]) -> LogProbabilities:
    """Return log-probabilities of rows end to end."""
    return np.concatenate([np.array(row, np.float32) for row in rows])
