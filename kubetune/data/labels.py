"""What a classifier is to tell apart: the kind of problem, the names of its classes, and labels as numbers.

Names come from the config, from the model where it already knows these classes, or from the labels in the data.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from kubetune.config.schema import ClassificationConfig, Config
from kubetune.data import hub
from kubetune.data.formats import Label, Labelled, convert
from kubetune.data.problems import Problems
from kubetune.data.sources import read_source
from kubetune.data.tokenizer_files import read_json
from kubetune.errors import DataError
from kubetune.files import write_atomic

UNLABELLED = (
    "it marks a row without a label, as in the test splits of GLUE; take a labelled split, such as validation, or let "
    "`kubetune generate` say what the model thinks"
)
NAMES_SHOWN = 12

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]


@dataclass(frozen=True)
class Labels:
    """The labels of a run. `names` in the order of the model's outputs; regression has one output, named "value"."""

    problem_type: ProblemType
    names: tuple[str, ...]

    def __str__(self) -> str:
        """For people: the kind of problem and its classes."""
        if self.problem_type == "regression":
            return "regression"
        more = f" and {len(self.names) - NAMES_SHOWN:,} more" if len(self.names) > NAMES_SHOWN else ""
        return f"{self.problem_type.replace('_', ' ')}: {', '.join(self.names[:NAMES_SHOWN])}{more}"

    def target(self, label: Label) -> tuple[float, ...]:
        """A label as numbers: the index of a class, a 0 or 1 for every class, or the value itself.

        Raises ValueError for a label that is not among them.
        """
        if self.problem_type == "regression":
            number = _number(label)
            if number is None:
                raise ValueError(f"label is {label!r}; expected a finite number, as the task is regression")
            return (number,)
        if self.problem_type == "single_label_classification":
            if isinstance(label, tuple):
                raise ValueError(f"label is {list(label)}; expected one class, not a list")
            return (float(self._index(label)),)
        chosen = {self._index(name) for name in (label if isinstance(label, tuple) else (label,))}
        return tuple(float(index in chosen) for index in range(len(self.names)))

    def name(self, target: Sequence[float]) -> str | float | list[str]:
        """The label that `target` was made of: its name, the number, or the names."""
        if self.problem_type == "regression":
            return float(target[0])
        if self.problem_type == "single_label_classification":
            return self.names[int(target[0])]
        return [name for name, is_set in zip(self.names, target, strict=True) if is_set]

    def _index(self, label: str | int | float) -> int:
        if str(label) in self.names:
            return self.names.index(str(label))
        if isinstance(label, int) and 0 <= label < len(self.names):
            return label
        if str(label) == "-1":
            raise ValueError(f"label is -1: {UNLABELLED}")
        known = ", ".join(self.names[:NAMES_SHOWN]) + (" …" if len(self.names) > NAMES_SHOWN else "")
        raise ValueError(f"label is {label!r}; expected one of {known}, or a number from 0 to {len(self.names) - 1}")

    def model_settings(self) -> dict[str, Any]:
        """The same facts in the words of a transformers config."""
        return {
            "problem_type": self.problem_type,
            "num_labels": len(self.names),
            "id2label": dict(enumerate(self.names)),
            "label2id": {name: index for index, name in enumerate(self.names)},
        }

    def fix(self, config: Config) -> Config:
        """The config with these labels named, so that no others are looked for."""
        names = None if self.problem_type == "regression" else self.names
        return config.model_copy(
            update={"classification": ClassificationConfig(problem_type=self.problem_type, labels=names)}
        )

    def write(self, path: Path) -> None:
        """Keep the labels beside the rows that were encoded with them."""
        write_atomic(path, json.dumps({"problem_type": self.problem_type, "names": self.names}, ensure_ascii=False))

    @classmethod
    def read(cls, path: Path) -> Labels:
        """What `write` kept."""
        facts = json.loads(path.read_text(encoding="utf-8"))
        return cls(facts["problem_type"], tuple(facts["names"]))


def find_labels(config: Config) -> Labels | None:
    """The labels of a run; None when its task is not classification.

    Reads the sources of training once unless the config and the model say it all. Raises DataError when they hold no
    labels that make a problem.
    """
    if config.task != "sequence_classification":
        return None
    given, own = config.classification, _labels_of_model(config)
    kind = given.problem_type if given.problem_type != "auto" else own.get("problem_type")
    seen = set() if kind == "regression" or (kind and given.labels) else _distinct(config)
    kind = cast(ProblemType, kind or _guess(seen))
    if kind == "regression":
        return Labels(kind, ("value",))
    return Labels(kind, given.labels or _names(seen, own.get("id2label", {})))


def label_facts(config: Config) -> dict[str, Any]:
    """All besides the data that decides how labels become numbers, for a fingerprint."""
    return {"config": config.classification.model_dump(), "model": _labels_of_model(config)}


def _labels_of_model(config: Config) -> dict[str, Any]:
    files = hub.find_files(config.model, config.model.path, ("config.json",))
    facts = read_json(files.get("config.json"))
    return {name: facts[name] for name in ("problem_type", "id2label") if facts.get(name)}


def _distinct(config: Config) -> set[Label]:
    """Every label that occurs in the sources of training. Bad records are left to the encoding, which tells of them.

    Raises DataError when all are bad.
    """
    seen: set[Label] = set()
    first_bad = ""
    for source in config.data.train:
        for record in read_source(source, Problems()):
            try:
                example = convert(record.value, source.format, source.columns, labelled=True)
            except ValueError as error:
                first_bad = first_bad or f"{record.where}: {error}"
                continue
            if isinstance(example, Labelled):
                seen.add(example.label)
    if first_bad and not seen:
        raise DataError(
            f"data.train holds no labels. {first_bad}. Where columns have other names, say so: "
            "`data: {train: {path: FILE, columns: {label: COLUMN}}}`. Nothing was written."
        )
    return seen


def _guess(seen: set[Label]) -> ProblemType:
    if any(isinstance(label, tuple) for label in seen):
        return "multi_label_classification"
    numbers = [_number(label) for label in seen]
    if seen and None not in numbers and any(number != int(number) for number in numbers if number is not None):
        return "regression"
    return "single_label_classification"


def _number(label: Label) -> float | None:
    try:
        number = float(cast(Any, label))
    except (TypeError, ValueError):
        return None
    return number if abs(number) < float("inf") else None


def _names(seen: set[Label], id2label: dict[str, str]) -> tuple[str, ...]:
    """Names of classes: the model's where it knows all that were seen, else what was seen, in order."""
    flat = {name for label in seen for name in (label if isinstance(label, tuple) else (label,))}
    own = tuple(id2label[key] for key in sorted(id2label, key=int))
    if own and not all(name.startswith("LABEL_") for name in own) and _cover(own, flat):
        return own
    numbers = [label for label in flat if isinstance(label, int)]
    if len(numbers) == len(flat) and numbers:
        if min(numbers) < 0:
            raise DataError(
                f"label {min(numbers)} stands in the data of training; classes are numbered from 0. -1: {UNLABELLED}. "
                "Nothing was written."
            )
        names: Sequence[str] = [str(number) for number in range(max(2, max(numbers) + 1))]
    else:
        names = sorted(str(label) for label in flat)
    if len(names) < 2:
        found = f"only the label {names[0]!r}" if names else "no labels"
        raise DataError(
            f"data.train holds {found}; a classifier needs at least two classes. Give them in `classification.labels`, "
            "or name the column in `data.train.columns`. Nothing was written."
        )
    return tuple(names)


def _cover(names: Sequence[str], labels: set[Any]) -> bool:
    return all(label in names or (isinstance(label, int) and 0 <= label < len(names)) for label in labels)
