"""The classes of a classifier: the kind of problem, the names of its classes, and labels as numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeGuard, assert_never, cast

from kubetune.base.files import read_inside, write_atomic
from kubetune.config.metric_names import CLASSIFIER_METRICS, ProblemType
from kubetune.config.schema import ClassificationConfig
from kubetune.data.reading.examples import Label

UNLABELLED: Final = (
    "it marks a row without a label, as in the test splits of GLUE; take a labelled split, such as validation, or let "
    "`kubetune generate` say what the model thinks"
)
NAMES_SHOWN: Final = 12
# How a text writes a number, and how tables write a whole number.
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_WHOLE_NUMBER: Final = re.compile(r"-?(0|[1-9]\d*)(\.0*)?", re.ASCII)
# How the readers write `false` and `true`, and which of two classes they stand for.
_TRUTHS: Final = {"False": 0, "True": 1}


@dataclass(frozen=True)
class Labels:
    """The labels of a run."""

    problem_type: ProblemType
    # In the order of the model's outputs. Regression has one output, named "value".
    names: tuple[str, ...]

    def __str__(self) -> str:
        """Return the kind of problem and its classes, for people."""
        if self.problem_type == "regression":
            return "regression"
        text = f"{self.problem_type.replace('_', ' ')}: {', '.join(self.names[:NAMES_SHOWN])}"
        if len(self.names) > NAMES_SHOWN:
            text += f" and {len(self.names) - NAMES_SHOWN:,} more"
        return text

    def target(self, label: Label) -> tuple[float, ...]:
        """Return a label as numbers: the index of a class, a 0 or 1 for every class, or the value itself.

        With the names a, b, c: `b` is (1.0,); of several labels at once, `(a, c)` is (1.0, 0.0, 1.0).
        Raise ValueError for a label that is not among them.
        """
        match self.problem_type:
            case "regression":
                number = number_of(label)
                if number is None:
                    raise ValueError(
                        f"label is {label!r}; expected a finite number, as the task is regression; "
                        "classification.problem_type can say otherwise"
                    )
                return (number,)
            case "single_label_classification":
                if isinstance(label, tuple):
                    raise ValueError(f"label is {list(label)}; expected one class, not a list")
                return (float(self._index(label)),)
            case "multi_label_classification":
                return self._target_of_several(label)
            case unknown:
                assert_never(unknown)

    def _target_of_several(self, label: Label) -> tuple[float, ...]:
        """Return a 0 or 1 for each class. The label has these too, or lists the classes that apply."""
        if is_vector(label):
            if len(label) != len(self.names):
                raise ValueError(
                    f"label is a list of {len(label)} zeros and ones; expected {len(self.names)}, one for each of "
                    f"{listed(self.names)}"
                )
            return label

        names = label if isinstance(label, tuple) else (label,)
        chosen = {self._index(name) for name in names}
        return tuple(float(index in chosen) for index in range(len(self.names)))

    def name(self, target: Sequence[float]) -> str | float | list[str]:
        """Return the label that a target stands for: a name, a number, or names."""
        match self.problem_type:
            case "regression":
                return float(target[0])
            case "single_label_classification":
                return self.names[int(target[0])]
            case "multi_label_classification":
                return [name for name, is_set in zip(self.names, target, strict=True) if is_set]
            case unknown:
                assert_never(unknown)

    def _index(self, label: str | int | float) -> int:
        index = class_index(self._indexes, label)
        if index is not None:
            return index
        # The hub's data sets write -1 where a label is kept secret.
        if whole_number_of(label) == -1:
            raise ValueError(f"label is -1: {UNLABELLED}")
        expected = listed(self.names)
        if not are_numbers(self.names):
            expected += f", or a number from 0 to {len(self.names) - 1}"
        raise ValueError(
            f"label is {label!r}; expected one of {expected}. If a class is missing in the data of training, list it "
            "with the others in `classification.labels`"
        )

    @cached_property
    def _indexes(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.names)}

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics of an evaluation."""
        # F1 is of the positive class, and only of two classes is one the positive one.
        names = CLASSIFIER_METRICS[self.problem_type].split()
        return tuple(f"eval_{name}" for name in names if name != "f1" or len(self.names) == 2)

    def model_settings(self) -> dict[str, Any]:
        """Return the same facts in the words of a transformers config."""
        return {
            "problem_type": self.problem_type,
            "num_labels": len(self.names),
            "id2label": dict(enumerate(self.names)),
            "label2id": dict(self._indexes),
        }

    def section(self) -> ClassificationConfig:
        """Return the section of a config with these labels named, so that no others are looked for."""
        names = None if self.problem_type == "regression" else self.names
        return ClassificationConfig(problem_type=self.problem_type, labels=names)

    def write(self, path: Path) -> None:
        """Keep the labels beside the rows that were encoded with them."""
        facts = {"problem_type": self.problem_type, "names": self.names}
        write_atomic(path, json.dumps(facts, ensure_ascii=False))

    @classmethod
    def read(cls, path: Path) -> Labels:
        """Return labels as `write` kept them."""
        facts = json.loads(read_inside(path))
        return cls(facts["problem_type"], tuple(facts["names"]))


def listed(names: Sequence[str]) -> str:
    """Return the first names in one line."""
    text = ", ".join(names[:NAMES_SHOWN])
    if len(names) > NAMES_SHOWN:
        text += " …"
    return text


def is_vector(label: Label) -> TypeGuard[tuple[float, ...]]:
    """True if the label has a 0.0 or 1.0 for every class."""
    return isinstance(label, tuple) and bool(label) and isinstance(label[0], float)


def number_of(label: Label) -> float | None:
    """Return the finite number that a label is, or that its text writes: `0.5`, `-3`, `1e-05`.

    Names that only Python takes for numbers are no numbers: `1_000`, `１`, `nan`.
    """
    if isinstance(label, str) and not _NUMBER.fullmatch(label):
        return None
    try:
        number = float(cast(Any, label))
    except (TypeError, OverflowError):  # a list, or a whole number beyond what a float holds
        return None

    if not abs(number) < float("inf"):  # NaN is not smaller either
        return None
    return number


def whole_number_of(label: Label) -> int | None:
    """Return the whole number that a label is, None for others.

    `2` is one, and so is `2.0`: tables write that if another row has no label. Texts such as `01`, `1e3` and `+1` are
    names, so that names that look alike stay apart.
    """
    if isinstance(label, int):
        return label
    if isinstance(label, str) and not _WHOLE_NUMBER.fullmatch(label):
        return None
    number = number_of(label)
    if number is None or number != int(number):
        return None
    return int(number)


def class_index(indexes: Mapping[str, int], label: str | int | float) -> int | None:
    """Return the index of a label's class, None for a label that is no class. `indexes`: name -> index.

    A number is an index if the classes have names, and a name if they are called by numbers.
    """
    # The name as the data write it, or a number in another form: 2.0 for the class "2".
    if str(label) in indexes:
        return indexes[str(label)]
    number = whole_number_of(label)
    if number is not None and str(number) in indexes:
        return indexes[str(number)]

    # False and True: the classes of these names in any spelling, else the two classes that there are.
    if label in _TRUTHS:
        by_lower_name = {name.lower(): index for name, index in indexes.items()}
        if str(label).lower() in by_lower_name:
            return by_lower_name[str(label).lower()]
        if len(indexes) == 2:
            return _TRUTHS[str(label)]
        return None

    # An index, unless classes are called by numbers: then it would be another class's name.
    if number is None or not 0 <= number < len(indexes) or are_numbers(indexes):
        return None
    return number


def with_names(label: Label, names: Sequence[str]) -> Label:
    """Return a label with names for its numbers, which count `names`; a number beyond them stays."""
    if is_vector(label):
        return label
    if isinstance(label, tuple):
        return tuple(_name_of(item, names) for item in label)
    return cast(Label, _name_of(label, names))


def _name_of(label: Any, names: Sequence[str]) -> Any:
    # A number beyond the names is left for the check to name.
    if isinstance(label, int) and 0 <= label < len(names):
        return names[label]
    return label


def cover(names: Sequence[str], labels: set[Any]) -> bool:
    """True if all labels are among the names."""
    indexes = {name: index for index, name in enumerate(names)}
    # False and True fit any two classes, so they show nothing of the names.
    if not labels.isdisjoint(_TRUTHS) and labels.isdisjoint(indexes):
        return False
    return all(class_index(indexes, label) is not None for label in labels)


def are_numbers(names: Iterable[str]) -> bool:
    """True if a class is named by a number, as where the data have no names for classes.

    Then a number is only a name, never an index: beside `1`, `2` and `other`, a 2 cannot also be the index of `other`.
    """
    return any(number_of(name) is not None or name.isdecimal() for name in names)
