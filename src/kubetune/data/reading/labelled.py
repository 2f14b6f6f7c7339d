"""Texts that are to be classified, or two that are compared, with their labels."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from kubetune.data.column_names import names_metadata, names_subject
from kubetune.data.column_words import in_words
from kubetune.data.reading.examples import Label, Labelled
from kubetune.data.reading.fields import Fields, first_of, keys, parsed, required, show, text_of
from kubetune.data.record_values import is_prose

Value = Mapping[str, Any]

# Characters of a class by its name; a longer text is to be classified.
_LONGEST_CLASS: Final = 40
# Names of two texts that are compared.
_PAIRS: Final = (
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text", "text_pair"),
)


# Names of what is classified.
_TEXTS: Final = frozenset({"sentence", "text", *(name for pair in _PAIRS for name in pair)})


def read_labelled(value: Fields) -> Labelled:
    """Return a text, or two, with the label. Raise ValueError where one of them is missing."""
    text, second = texts_of(value)
    key = label_key(value, is_pair=second is not None)
    try:
        label = required(value, key)
    except ValueError as error:
        raise ValueError(f"{error}{_other_label(value)}") from None
    return Labelled(text, second, _label(label))


def _other_label(value: Fields) -> str:
    """Return what one may paste where a record has its label under another name, by what its columns hold."""
    key = _class_in(value, value.columns.values())
    return _advice({**value.columns, "label": key}, f"`{key}` is the label") if key else ""


def _other_text(value: Value) -> str:
    """Return what one may paste where a record has its text under another name: the only column that holds several words.

    Beside what it is about, such as a passage, it is one of two texts.
    """
    texts = [key for key, item in value.items() if isinstance(item, str) and is_prose(item)]
    texts.sort(key=names_subject)
    is_pair = [names_subject(key) for key in texts] == [False, True]
    if len(texts) != 1 and not is_pair:
        return ""
    columns = {**getattr(value, "columns", {}), "text": texts[0]}
    meanings = [f"`{texts[0]}` is the text"]
    if is_pair:
        columns["text_pair"] = texts[1]
        meanings.append(f"`{texts[1]}` what it is about")
    if "label" not in value and "labels" not in value:
        key = _class_in(value, texts)
        if not key:
            return ""
        columns["label"] = key
        meanings.append(f"`{key}` the label")
    *first, last = meanings
    return _advice(columns, f"{', '.join(first)} and {last}" if first else last)


def _class_in(value: Value, taken: Collection[str]) -> str:
    """Return the first column that holds a short text or a whole number, and is not taken; empty without one."""
    for key, item in value.items():
        is_class = isinstance(item, (bool, int)) or (
            isinstance(item, str) and 0 < len(item) <= _LONGEST_CLASS and "\n" not in item
        )
        if is_class and key not in _TEXTS and key not in taken and not names_metadata(key):
            return key
    return ""


def _advice(columns: Mapping[str, str], meaning: str) -> str:
    """Return how one says what columns are, on the command line and in a run file."""
    written = ", ".join(f"{name}: {column}" for name, column in columns.items())
    return f"; if {meaning}, say so: `{in_words(columns)}`, or `columns: {{{written}}}` below the path in a run file"


def label_key(value: Value, *, is_pair: bool) -> str:
    """Return the key that a record's label is under.

    Data sets with several labels write `labels`; those with pairs to compare have a `score`.
    """
    names = ("label", "labels", "score") if is_pair else ("label", "labels")
    return first_of(names, value) or "label"


def pair_in(names: Collection[str]) -> bool:
    """True if two of these names are those of texts that are compared."""
    return any(first in names and second in names for first, second in _PAIRS[:3])


def texts_of(value: Value) -> tuple[str, str | None]:
    """Return the text, or two, of a record to be classified. Raise ValueError where there is none."""
    for first, second in _PAIRS:
        if first in value and second in value:
            return text_of(value[first], first), text_of(value[second], second)

    key = first_of(("sentence", "text"), value)
    if key is None:
        raise ValueError(
            f"{keys(value)}; expected `sentence`, `text`, or `premise` and `hypothesis`, with `label`{_other_text(value)}"
        )
    return text_of(value[key], key), None


def has_texts(value: Value) -> bool:
    """True for a record with a text to be classified, or two."""
    try:
        texts_of(value)
    except ValueError:
        return False
    return True


# A text that is a number, as a table writes it; `01`, `1_000` and `１` are names.
_WHOLE_NUMBER: Final = re.compile(r"-?(0|[1-9]\d*)", re.ASCII)


def _label(label: Any) -> Label:
    """Return a label as it is read: without the space around a name, `true` and `false` as tables name them."""
    if isinstance(label, str):
        label = label.strip()
        # Tables hold a list of labels as JSON.
        if label.startswith("["):
            label = parsed(label, "label")

    if isinstance(label, list):
        return _several(label)
    if isinstance(label, bool):
        return str(label)
    # Files without types have numbers as text.
    if isinstance(label, str) and _WHOLE_NUMBER.fullmatch(label):
        label = int(label)

    is_no_number = isinstance(label, float) and not math.isfinite(label)
    if is_no_number or not isinstance(label, (int, float, str)) or label == "":
        raise ValueError(
            f"label is {show(label)}; expected a class by name or number, a list of them, or a number"
        )

    return label


def _several(labels: list[Any]) -> Label:
    """Return several labels: the classes that apply, or a 0.0 or 1.0 for every class.

    [2, 5] are two classes, [0.0, 1.0, 1.0] and [false, true, true] say of three classes whether each applies.
    """
    are_flags = all(isinstance(label, bool) for label in labels)
    # 0 and 1 as whole numbers may be classes, so at least one has to be written as a float.
    if any(isinstance(label, float) for label in labels):
        are_flags = all(label in (0, 1) for label in labels)
    if labels and are_flags:
        return tuple(1.0 if label else 0.0 for label in labels)

    classes = []
    for label in labels:
        if isinstance(label, bool) or not isinstance(label, (int, str)):
            what = "a list of names or numbers of classes, or 0.0 or 1.0 for every class"
            raise ValueError(f"label is {show(labels)}; expected {what}")
        classes.append(label.strip() if isinstance(label, str) else label)

    if len(set(classes)) < len(classes):
        # [1, 0, 1] is refused here: it would be read as classes 1 and 0, and was hardly meant so.
        what = "each class that applies once, by name or number; a 0 or 1 for every class is written 0.0 or 1.0"
        raise ValueError(f"label is {show(classes)}; expected {what}")

    return tuple(classes)
