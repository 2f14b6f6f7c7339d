"""Find the classes of a classifier.

Names of classes come from the config, from a data set that has names for its numbers, from the model if it already
knows these classes, or else from the labels in the data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from typing import Any, Final, cast

from kubetune.config.metric_names import ProblemType
from kubetune.config.schema import ClassificationConfig, ModelConfig, SourceConfig
from kubetune.data.reading import hub
from kubetune.data.reading.examples import Example, Label, Labelled
from kubetune.data.reading.formats import convert
from kubetune.data.reading.labelled import label_key
from kubetune.data.reading.record import Record
from kubetune.data.reading.record_problems import Problems
from kubetune.data.reading.sources import class_names, read_source
from kubetune.data.reading.strict_json import JsonObject
from kubetune.data.text.class_labels import (
    UNLABELLED,
    Labels,
    are_numbers,
    cover,
    is_vector,
    listed,
    number_of,
    whole_number_of,
    with_names,
)
from kubetune.data.text.odd_labels import joined_labels, spelt_numbers, unlabelled_marks
from kubetune.data.text.tokenizer_files import read_json
from kubetune.errors import NOTHING_WRITTEN, DataError

# Part of the fingerprint of prepared data. Raise it when the same labels would become other numbers or names.
RULES: Final = 5
# Labels 0 … N count classes, of which some may not occur. If more than this many are missing, they are no count.
MOST_UNSEEN: Final = 1000


@dataclass
class _SeenLabels:
    """The labels that occur in the data of training."""

    labels: set[str | int | float] = field(default_factory=set)
    has_lists: bool = False
    # Of lists with a 0.0 or 1.0 for every class; 0 if there are none.
    width: int = 0
    # Pairs have a `score` in place of a label, which is a number to predict.
    are_scores: bool = False
    # The first record that is refused, and why.
    first_bad: str = ""

    def add(self, label: Label) -> None:
        """Add the label of one record."""
        if is_vector(label):
            self.has_lists = True
            self.width = max(self.width, len(label))
        elif isinstance(label, tuple):
            self.has_lists = True
            self.labels.update(label)
        else:
            self.labels.add(label)


def find_labels(
    classification: ClassificationConfig,
    model: ModelConfig,
    sources: Mapping[Any, Sequence[SourceConfig]],
) -> Labels:
    """Return the labels of a classifier. `sources`: split -> its sources.

    The training data are read once, unless the config and the model decide everything. Raise DataError if they hold no
    usable labels, or if their data sets number the classes differently.
    """
    # What the config says comes first, then what the model knows.
    of_model = _labels_of_model(model)
    problem_type: str | None = classification.problem_type
    if problem_type == "auto":
        problem_type = of_model.get("problem_type")

    seen = _SeenLabels()
    needs_classes = problem_type != "regression" and not classification.labels
    if not problem_type or needs_classes:
        seen = _look_through(sources["train"])

    kind = cast(ProblemType, problem_type or _guess(seen))
    if kind == "regression":
        return Labels(kind, ("value",))

    # Also those of evaluation: a number must mean the same class everywhere.
    all_sources = list(chain(*sources.values()))
    names_in_data = _names_in_data(classification, all_sources)
    if classification.labels:
        names = classification.labels
    else:
        names = _names(seen, names_in_data, of_model.get("id2label", {}))

    labels = Labels(kind, names)
    if kind == "multi_label_classification" and len(names) == 2:
        _require_one_reading(all_sources, names)
    return labels


def names_of_numbers(source: SourceConfig, names: Sequence[str]) -> tuple[str, ...]:
    """Return a data set's names for its numbers if the numbers could be taken for other classes of the run, else ().

    `names`: the run's. Example: `class_encode_column` of `datasets` makes the numbers 0, 2 and 1 of the ratings 1, 2 and
    10, since it sorts them as texts: "1", "10", "2". So its number 2 is the class "2", and its 1 is "10".
    """
    if not are_numbers(names):
        return ()
    of_data = class_names(source)
    if set(of_data).isdisjoint(names):
        return ()
    return of_data


def label_facts(classification: ClassificationConfig, model: ModelConfig) -> JsonObject:
    """Return everything but the data that decides how labels become numbers, for a fingerprint."""
    return {
        "rules": RULES,
        "config": classification.model_dump(),
        "model": _labels_of_model(model),
    }


def _labels_of_model(model: ModelConfig) -> JsonObject:
    """Return what a model's config.json says about labels."""
    files = hub.find_files(model, model.path, ("config.json",))
    facts = read_json(files.get("config.json"))
    return {name: facts[name] for name in ("problem_type", "id2label") if facts.get(name)}


def _names_in_data(
    classification: ClassificationConfig, sources: Sequence[SourceConfig]
) -> tuple[str, ...]:
    """Return the names that the run's data sets have for the numbers in their labels, if any has.

    Raise DataError if two of them differ, or if one has those of `classification.labels` in another order.
    """
    # (where the names are from, the names)
    named: list[tuple[str, tuple[str, ...]]] = []
    if classification.labels:
        named.append(("classification.labels", classification.labels))
    for source in sources:
        names = class_names(source)
        # In a data set of the hub, each subset and split has its own names.
        parts = (source.path, source.subset, source.split)
        place = " ".join(part for part in parts if part)
        if names:
            named.append((place, names))

    for (first_place, first), (place, names) in combinations(named, 2):
        differs = names != first and not classification.labels
        if differs or _counts_otherwise(names, first):
            raise DataError(
                f"{place} numbers its classes {listed(names)}, but {first_place} {listed(first)}: one number would "
                f"mean two classes. Give all the same names in the same order. {NOTHING_WRITTEN}"
            )

    if not named:
        return ()
    _, names = named[0]
    return names


def _counts_otherwise(names: Sequence[str], others: Sequence[str]) -> bool:
    """True if some name has different numbers in the two lists.

    `classification.labels` may give the classes of a data set other names, but not the same names in another order.
    """
    numbers = {name: number for number, name in enumerate(others)}
    return any(numbers.get(name, number) != number for number, name in enumerate(names))


def _look_through(sources: Sequence[SourceConfig]) -> _SeenLabels:
    """Return every label in the training data. Raise DataError if all records are bad.

    Single bad records are reported when they are encoded, not here.
    """
    seen = _SeenLabels()
    problems = Problems()
    is_empty = True
    for source in sources:
        # Names of classes are applied later, when it is known that the run uses them. But where the names are numbers
        # themselves, the data's number is an index, and the name is the label.
        names = class_names(source)
        if not are_numbers(names):
            names = ()
        for record in read_source(source, problems):
            try:
                example = _example(record, source)
            except ValueError as error:
                seen.first_bad = seen.first_bad or f"{record.where}: {error}"
                continue

            if not isinstance(example, Labelled):
                continue
            is_empty = False
            seen.add(with_names(example.label, names))
            key = label_key(record.value, is_pair=example.second is not None)
            if key == "score" and "label" not in source.columns:
                seen.are_scores = True

    if is_empty and not seen.first_bad:
        problems.raise_if_any()
    # Some records are good, so the others are reported one by one.
    if not seen.first_bad or not is_empty:
        return seen
    if "`label` is missing" in seen.first_bad:
        raise DataError(
            f"data.train holds no labels. {seen.first_bad}. Where columns have other names, say so: "
            f"`data: {{train: {{path: FILE, columns: {{label: COLUMN}}}}}}`. {NOTHING_WRITTEN}"
        )

    raise DataError(
        f"data.train holds no record that can be read. {seen.first_bad}. {NOTHING_WRITTEN}"
    )


def _example(record: Record, source: SourceConfig) -> Example:
    """Return a record as an example with a label. Raise ValueError if it is none."""
    return convert(record.value, source.format, source.columns, kind="labelled")


def _require_one_reading(sources: Sequence[SourceConfig], names: Sequence[str]) -> None:
    """Raise DataError if all lists of whole numbers in a source are `[1, 0]` or `[0, 1]`, and there are two classes.

    Such a list has two meanings: the numbers of the classes that apply, so both, in every row; or a 0 or 1 for each
    class, so one. With more classes the second kind of list would hold a number twice, which is refused anyway. Lists
    of 0.0 and 1.0 elsewhere in the source do not decide it.
    """
    for source in sources:
        if class_names(source):
            continue
        where = _only_zero_and_one(source)
        if where:
            raise DataError(
                f"{where}: label is [0, 1] or [1, 0], as in every list of whole numbers in {source.path}, and there "
                f"are two classes ({listed(names)}). It may list the numbers of the classes that apply, which are both, "
                "or say 0 or 1 of each class. Write names for the first, such as "
                f"{json.dumps(names, ensure_ascii=False)}, and [0.0, 1.0] for the second. {NOTHING_WRITTEN}"
            )


def _only_zero_and_one(source: SourceConfig) -> str:
    """Return the place of the first list of 0 and 1; empty if some label shows that lists are numbers of classes."""
    first = ""
    for record in read_source(source, Problems()):
        try:
            example = _example(record, source)
        except ValueError:
            continue  # reported when it is encoded

        if not isinstance(example, Labelled):
            continue
        label = example.label
        if is_vector(label):
            continue
        if not isinstance(label, tuple) or set(label) != {0, 1}:
            return ""
        first = first or record.where

    return first


def _guess(seen: _SeenLabels) -> ProblemType:
    """Return the kind of problem that the labels look like."""
    if seen.has_lists:
        return "multi_label_classification"
    if seen.are_scores:
        return "regression"
    numbers = []
    has_fraction = False
    for label in seen.labels:
        number = number_of(label)
        if number is not None:
            numbers.append(number)
            has_fraction = has_fraction or number != int(number)

    # A few words among many numbers are bad records, not classes.
    if has_fraction and 2 * len(numbers) > len(seen.labels):
        return "regression"
    return "single_label_classification"


def _names(
    seen: _SeenLabels,
    named: tuple[str, ...],
    id2label: Mapping[str, str],
) -> tuple[str, ...]:
    """Return the data set's names, or the model's, if they fit all labels, else the labels themselves."""
    # Lists of 0.0 and 1.0 have as many classes as they are long.
    labels = seen.labels | set(range(seen.width))
    of_model = tuple(id2label[key] for key in sorted(id2label, key=int))
    if all(name.startswith("LABEL_") for name in of_model):
        of_model = ()  # transformers' own names for classes without one
    for names in (named, of_model):
        if names and len(names) >= seen.width and cover(names, labels):
            return names

    marks = unlabelled_marks({str(label) for label in labels})
    if marks:
        others = sorted({str(label) for label in labels} - {*marks})
        raise DataError(f"{_unlabelled(marks, others)}. {NOTHING_WRITTEN}")

    # Only numbers: they count classes.
    numbers = []
    for label in labels:
        number = whole_number_of(label)
        if number is not None:
            numbers.append(number)

    if numbers and len(numbers) == len(labels):
        return _numbered(numbers)

    # Names in alphabetical order, so that the same data give the same numbers.
    names = tuple(sorted({str(label) for label in labels}))
    if numbers and not _are_codes(names):
        words = [name for name in names if whole_number_of(name) is None]
        reason = _why_no_names(words, names)
        if reason:
            beside = listed(sorted(map(str, set(numbers))))
            raise DataError(
                f"label {words[0]!r} stands in the data of training beside {beside}, and {reason}. {NOTHING_WRITTEN}"
            )
        raise DataError(
            f"data.train holds labels that are numbers ({listed(sorted(map(str, set(numbers))))}) and labels that are "
            f"names ({listed(words)}); nothing says whether a number is a class of its own or counts the others. List "
            f"all classes in `classification.labels`, in whose order numbers count, or fix the data. {NOTHING_WRITTEN}"
        )

    if len(names) < 2:
        raise DataError(_too_few(names, seen.first_bad))
    return names


def _why_no_names(words: Sequence[str], names: Sequence[str]) -> str:
    """Return what labels beside numbers are if they are no names, and what to write; empty for names."""
    joined = joined_labels(names)
    as_list = json.dumps(joined.get(words[0], []))
    if spelt_numbers(words):
        text = (
            "is a number in another spelling. Write it with a point and without signs, such as 4.5"
        )
        return (
            f"{text}; or as the list {as_list} if it joins classes" if words[0] in joined else text
        )
    if joined and joined.keys() == set(words):
        return f"seems to join several of them. Write such labels as lists, {as_list}; in a table as this text"
    return ""


def _are_codes(names: Sequence[str]) -> bool:
    """True for codes such as `01` to `12`: all are digits, and no two are the same number."""
    are_short_digits = all(name.isdecimal() and len(name) <= 20 for name in names)
    return are_short_digits and len(set(map(int, names))) == len(names)


def _numbered(numbers: Sequence[int]) -> tuple[str, ...]:
    """Return the classes that numbers stand for: all from the least to the greatest, such as ratings from 1 to 5.

    Grades on both sides of 0, such as -1, 0 and 1 for what texts feel, are classes too.
    """
    least = min(numbers)
    most = max(numbers)
    count = len(set(numbers))
    if count == 2 and least == -most:
        return (str(least), str(most))
    if least < 0 and least != -most:
        raise DataError(f"{_negative(set(numbers))}. {NOTHING_WRITTEN}")

    if least >= 0 and (most <= 1 or count == 1):  # one of two classes may be missing
        least = 0
    if most + 1 - least - count > MOST_UNSEEN:
        raise DataError(
            f"label {most} stands in the data of training; numbers count classes, and of {most + 1 - least:,} from "
            f"{least} on only {count:,} occur. List the existing ones in `classification.labels`; for numbers to "
            "predict set `classification.problem_type: regression`; or name another column in `data.train.columns`. "
            f"{NOTHING_WRITTEN}"
        )

    return tuple(str(number) for number in range(least, max(2, most + 1)))


def _negative(numbers: set[int]) -> str:
    """Return what is said of labels below 0 that are no grades on both sides of it."""
    if numbers == {-1}:
        return f"label -1 stands in each record of training: {UNLABELLED}"
    below = sorted(number for number in numbers if number < 0)
    others = sorted(number for number in numbers if number >= 0)
    return _unlabelled(list(map(str, below)), list(map(str, others)))


def _unlabelled(marks: Sequence[str], others: Sequence[str]) -> str:
    """Return what is said of labels that seem to mark records without one. `others`: the labels beside them."""
    beside = f" beside {listed(others)}" if others else ""
    return (
        f"label {listed(marks)} stands in the data of training{beside}. Leave these records out if it marks such as have "
        "no label; if it is a class, list all classes in `classification.labels`"
    )


def _too_few(names: Sequence[str], first_bad: str) -> str:
    labels = "no labels"
    if names:
        labels = f"only the label {names[0]!r}"
    refused = ""
    if first_bad:
        refused = f"{first_bad}. Without the records that are refused, "
    return (
        f"{refused}data.train holds {labels}; a classifier needs at least two classes. Give them in "
        f"`classification.labels`, or name the column in `data.train.columns`. {NOTHING_WRITTEN}"
    )
