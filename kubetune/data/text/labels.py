"""Classes that a classifier is to tell apart: the kind of problem, the names of its classes, and labels as numbers.

Names come from the config, from a data set that names its numbers, from the model where it already knows these classes,
or from the labels in the data.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeGuard, cast

from kubetune.base.files import read_inside, write_atomic
from kubetune.config.metric_names import CLASSIFIER_METRICS, ProblemType
from kubetune.config.schema import ClassificationConfig, Config, SourceConfig
from kubetune.data.reading import hub
from kubetune.data.reading.formats import Label, Labelled, convert, label_key
from kubetune.data.reading.problems import Problems
from kubetune.data.reading.sources import class_names, read_source
from kubetune.data.text.tokenizer_files import read_json
from kubetune.errors import DataError

UNLABELLED = (
    "it marks a row without a label, as in the test splits of GLUE; take a labelled split, such as validation, or let "
    "`kubetune generate` say what the model thinks"
)
NAMES_SHOWN = 12
RULES = 3
"""Changes when the same labels would become other numbers or names."""
MOST_UNSEEN = 1000
"""Classes that may be missing where numbers count them; more, and they are no count."""


@dataclass(frozen=True)
class Labels:
    """The labels of a run. `names` in the order of the model's outputs; regression has one output, named "value"."""

    problem_type: ProblemType
    names: tuple[str, ...]

    def __str__(self) -> str:
        """For people: the kind of problem and its classes."""
        if self.problem_type == "regression":
            return "regression"
        more = (
            f" and {len(self.names) - NAMES_SHOWN:,} more" if len(self.names) > NAMES_SHOWN else ""
        )
        return f"{self.problem_type.replace('_', ' ')}: {', '.join(self.names[:NAMES_SHOWN])}{more}"

    def target(self, label: Label) -> tuple[float, ...]:
        """A label as numbers: the index of a class, a 0 or 1 for every class, or the value itself.

        Raises ValueError for a label that is not among them.
        """
        if self.problem_type == "regression":
            number = _number(label)
            if number is None:
                raise ValueError(
                    f"label is {label!r}; expected a finite number, as the task is regression; "
                    "classification.problem_type can say otherwise"
                )
            return (number,)
        if self.problem_type == "single_label_classification":
            if isinstance(label, tuple):
                raise ValueError(f"label is {list(label)}; expected one class, not a list")
            return (float(self._index(label)),)
        if is_vector(label):
            if len(label) != len(self.names):
                raise ValueError(
                    f"label is a list of {len(label)} zeros and ones; expected {len(self.names)}, one for each of "
                    f"{self._known}"
                )
            return label
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
        index = _class_index(self._indexes, label)
        if index is not None:
            return index
        if _whole(label) == -1:
            raise ValueError(f"label is -1: {UNLABELLED}")
        expected = self._known
        if not _are_numbers(self.names):
            expected += f", or a number from 0 to {len(self.names) - 1}"
        raise ValueError(
            f"label is {label!r}; expected one of {expected}. A class that the data of training lack is listed with "
            "the others in `classification.labels`"
        )

    @cached_property
    def _indexes(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.names)}

    @property
    def _known(self) -> str:
        return _shown(self.names)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics of an evaluation."""
        found = CLASSIFIER_METRICS[self.problem_type].split()
        return tuple(f"eval_{name}" for name in found if name != "f1" or len(self.names) == 2)

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
            update={
                "classification": ClassificationConfig(problem_type=self.problem_type, labels=names)
            }
        )

    def write(self, path: Path) -> None:
        """Keep the labels beside the rows that were encoded with them."""
        write_atomic(
            path,
            json.dumps(
                {"problem_type": self.problem_type, "names": self.names}, ensure_ascii=False
            ),
        )

    @classmethod
    def read(cls, path: Path) -> Labels:
        """Labels as `write` kept them."""
        facts = json.loads(read_inside(path))
        return cls(facts["problem_type"], tuple(facts["names"]))


@dataclass
class Seen:
    """The labels that occur. `width`: that of lists with a 0.0 or 1.0 for every class; 0 where there are none.

    `are_scores`: pairs have a `score` in the place of a label, which is a number to predict.
    """

    labels: set[str | int | float] = field(default_factory=set)
    has_lists: bool = False
    width: int = 0
    are_scores: bool = False
    first_bad: str = ""  # the first record that is refused, and why

    def add(self, label: Label) -> None:
        """Note one more."""
        if is_vector(label):
            self.has_lists, self.width = True, max(self.width, len(label))
        elif isinstance(label, tuple):
            self.has_lists = True
            self.labels.update(label)
        else:
            self.labels.add(label)


def find_labels(config: Config) -> Labels | None:
    """The labels of a run; None when its task is not classification.

    Reads the sources of training once unless the config and the model say it all. Raises DataError when they hold no
    labels that make a problem, or their data sets number the classes differently.
    """
    if config.task != "sequence_classification":
        return None
    given, own = config.classification, _labels_of_model(config)
    kind = given.problem_type if given.problem_type != "auto" else own.get("problem_type")
    seen = Seen() if kind == "regression" or (kind and given.labels) else _look_through(config)
    kind = cast(ProblemType, kind or _guess(seen))
    if kind == "regression":
        return Labels(kind, ("value",))
    named = _names_in_data(config)
    labels = Labels(kind, given.labels or _names(seen, named, own.get("id2label", {})))
    _require_one_reading(config, labels)
    return labels


def label_facts(config: Config) -> dict[str, Any]:
    """All besides the data that decides how labels become numbers, for a fingerprint."""
    return {
        "rules": RULES,
        "config": config.classification.model_dump(),
        "model": _labels_of_model(config),
    }


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMES_SHOWN]) + (" …" if len(names) > NAMES_SHOWN else "")


def is_vector(label: Label) -> TypeGuard[tuple[float, ...]]:
    """The label says 0.0 or 1.0 of every class."""
    return isinstance(label, tuple) and bool(label) and isinstance(label[0], float)


def _labels_of_model(config: Config) -> dict[str, Any]:
    files = hub.find_files(config.model, config.model.path, ("config.json",))
    facts = read_json(files.get("config.json"))
    return {name: facts[name] for name in ("problem_type", "id2label") if facts.get(name)}


def _names_in_data(config: Config) -> tuple[str, ...]:
    """The names that data sets of the run give to the numbers in their labels, if any does.

    Raises DataError where two of them differ, or one has those of `classification.labels` in another order.
    """
    found = {
        source.path: names
        for source in chain(*config.sources.values())
        if (names := class_names(source))
    }
    if config.classification.labels:
        found = {"classification.labels": config.classification.labels, **found}
    place, first = next(iter(found.items()), ("", ()))
    for other, names in found.items():
        if names != first and (set(names) == set(first) or place != "classification.labels"):
            raise DataError(
                f"{other} numbers its classes {_shown(names)}, but {place} {_shown(first)}: one number would mean two "
                "classes. Give all the same names in the same order. Nothing was written."
            )
    return first


def _look_through(config: Config) -> Seen:
    """Every label that occurs in the sources of training. Bad records are left to the encoding, which tells of them.

    Raises DataError when all are bad.
    """
    seen = Seen()
    is_empty = True
    for source in config.data.train:
        for record in read_source(source, Problems()):
            try:
                example = convert(record.value, source.format, source.columns, kind="labelled")
            except ValueError as error:
                seen.first_bad = seen.first_bad or f"{record.where}: {error}"
                continue
            if isinstance(example, Labelled):
                is_empty = False
                seen.add(example.label)
                is_pair = example.second is not None
                seen.are_scores |= (
                    "label" not in source.columns
                    and label_key(record.value, is_pair=is_pair) == "score"
                )
    if seen.first_bad and is_empty:
        if "`label` is missing" in seen.first_bad:
            raise DataError(
                f"data.train holds no labels. {seen.first_bad}. Where columns have other names, say so: "
                "`data: {train: {path: FILE, columns: {label: COLUMN}}}`. Nothing was written."
            )
        raise DataError(
            f"data.train holds no record that can be read. {seen.first_bad}. Nothing was written."
        )
    return seen


def _require_one_reading(config: Config, labels: Labels) -> None:
    """Raise DataError for a source in which every label is `[1, 0]` or `[0, 1]`, where there are two classes.

    As numbers of classes that is both of them, for every row. As a 0 or 1 for each class, it is one of the two. With
    more classes such a row holds a number twice, and is refused by that.
    """
    if labels.problem_type != "multi_label_classification" or len(labels.names) != 2:
        return
    for source in chain(*config.sources.values()):
        if not class_names(source) and (where := _only_zero_and_one(source)):
            raise DataError(
                f"{where}: label is [0, 1] or [1, 0], as in every row of {source.path}, and there are two classes "
                f"({_shown(labels.names)}). It may list the numbers of the classes that apply, which are both, or say 0 "
                "or 1 of each class. Write names for the first, such as "
                f"{json.dumps(labels.names, ensure_ascii=False)}, and [0.0, 1.0] for the second. Nothing was written."
            )


def _only_zero_and_one(source: SourceConfig) -> str:
    """Return where the first label stands, if all of a source are lists of the numbers 0 and 1; else nothing."""
    first = ""
    for record in read_source(source, Problems()):
        try:
            example = convert(record.value, source.format, source.columns, kind="labelled")
        except ValueError:
            continue  # the encoding tells of it
        if not isinstance(example, Labelled):
            continue
        label = example.label
        if is_vector(label) or not isinstance(label, tuple) or set(label) != {0, 1}:
            return ""
        first = first or record.where
    return first


def _guess(seen: Seen) -> ProblemType:
    if seen.has_lists:
        return "multi_label_classification"
    if seen.are_scores:
        return "regression"
    numbers = [number for label in seen.labels if (number := _number(label)) is not None]
    has_fraction = any(number != int(number) for number in numbers)
    # A few words among many numbers are bad records, not classes.
    return (
        "regression"
        if has_fraction and 2 * len(numbers) > len(seen.labels)
        else "single_label_classification"
    )


def _number(label: Label) -> float | None:
    try:
        number = float(cast(Any, label))
    except (TypeError, ValueError):
        return None
    return number if abs(number) < float("inf") else None


def _whole(label: Label) -> int | None:
    """The whole number that a label is: `2`, and `2.0` as tables write where a row has none."""
    number = _number(label)
    return int(number) if number is not None and number == int(number) else None


def _names(seen: Seen, named: tuple[str, ...], id2label: dict[str, str]) -> tuple[str, ...]:
    """Names of classes: the data set's, or the model's, where they fit all that were seen, else what was seen."""
    flat = seen.labels | set(range(seen.width))
    own = tuple(id2label[key] for key in sorted(id2label, key=int))
    own = () if all(name.startswith("LABEL_") for name in own) else own
    for names in (named, own):
        if names and len(names) >= seen.width and _cover(names, flat):
            return names
    numbers = [number for label in flat if (number := _whole(label)) is not None]
    if len(numbers) == len(flat) and numbers:
        return _numbered(numbers)
    names = tuple(sorted({str(label) for label in flat}))
    if numbers:
        raise DataError(
            _of_two_kinds(sorted(map(str, set(numbers))), [n for n in names if _whole(n) is None])
        )
    if len(names) < 2:
        raise DataError(_too_few(names, seen.first_bad))
    return names


def _numbered(numbers: Sequence[int]) -> tuple[str, ...]:
    """Return the classes that numbers stand for: all from the least to the most, such as ratings from 1 to 5."""
    least = min(numbers)
    most = max(numbers)
    count = len(set(numbers))
    if least < 0:
        raise DataError(
            f"label {least} stands in the data of training; classes are numbered from 0. -1: {UNLABELLED}. "
            "Nothing was written."
        )
    if most <= 1 or count == 1:  # one of two classes may be missing
        least = 0
    if most + 1 - least - count > MOST_UNSEEN:
        raise DataError(
            f"label {most} stands in the data of training; numbers count classes, and of {most + 1 - least:,} from "
            f"{least} on only {count:,} occur. List those there are in `classification.labels`; for numbers to predict "
            "set `classification.problem_type: regression`; or name another column in `data.train.columns`. Nothing was "
            "written."
        )
    return tuple(str(number) for number in range(least, max(2, most + 1)))


def _of_two_kinds(numbers: Sequence[str], names: Sequence[str]) -> str:
    return (
        f"data.train holds labels that are numbers ({_shown(numbers)}) and labels that are names ({_shown(names)}); "
        "nothing says whether a number is a class of its own or counts the others. List all classes in "
        "`classification.labels`, in whose order numbers count, or mend the data. Nothing was written."
    )


def _too_few(names: Sequence[str], first_bad: str) -> str:
    found = f"only the label {names[0]!r}" if names else "no labels"
    refused = f"{first_bad}. Without the records that are refused, " if first_bad else ""
    return (
        f"{refused}data.train holds {found}; a classifier needs at least two classes. Give them in `classification.labels`, "
        "or name the column in `data.train.columns`. Nothing was written."
    )


def _cover(names: Sequence[str], labels: set[Any]) -> bool:
    indexes = {name: index for index, name in enumerate(names)}
    if not labels.isdisjoint(_TRUTHS) and labels.isdisjoint(indexes):
        return False
    return all(_class_index(indexes, label) is not None for label in labels)


_TRUTHS = {"False": 0, "True": 1}
"""The labels that `false` and `true` are read as, and the classes of two that they stand for where these have names."""


def _are_numbers(names: Iterable[str]) -> bool:
    """True if classes are named by numbers, as where the data have no names for them."""
    return all(name.isdecimal() for name in names)


def _class_index(indexes: Mapping[str, int], label: str | int | float) -> int | None:
    """Return the place of a class among the names, None for a label that is none of them.

    A number is the place of a class that has a name, and the name of one that is called by a number.
    """
    if str(label) in indexes:
        return indexes[str(label)]
    number = _whole(label)
    if number is not None and str(number) in indexes:
        return indexes[str(number)]
    if label in _TRUTHS:
        lower = {name.lower(): index for name, index in indexes.items()}
        return lower.get(str(label).lower(), _TRUTHS[str(label)] if len(indexes) == 2 else None)
    if number is None or not 0 <= number < len(indexes) or _are_numbers(indexes):
        return None
    return number
