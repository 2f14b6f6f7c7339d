"""Labels that are hardly the name of a class: marks of records without a label, and several classes in one text."""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Mapping
from typing import Final

from kubetune.data.text.class_labels import number_of

# What programs write for nothing, and people for a record that nobody has labelled.
_NO_LABEL: Final = frozenset((
    "nan", "null", "n/a", "n.a.", "#n/a", "<na>", "nat", "unlabeled", "unlabelled", "unannotated", "not labeled",
    "not labelled", "not annotated", "no label", "without label", "missing label",
))  # fmt: skip
# The same of words that classes are called by, too: no stance, an unknown origin.
_MAY_BE_NO_LABEL: Final = frozenset((
    "none", "unknown", "na", "nil", "missing", "undefined", "unspecified", "undetermined", "tbd", "todo", "skip", "skipped",
    "not available", "not applicable", "empty", "blank",
))  # fmt: skip
_SIGNS: Final = frozenset(string.punctuation + "–—…")
# How tables of numbers mark one that is missing, and how far it is from the others, in widths of their range.
_MARK: Final = re.compile(r"-1|-?9{2,}|-9")
_FAR: Final = 1.5
# What stands between several classes in one text.
_SEPARATORS: Final = "|;,/+&\n\t"
# An amount of money, a share, or a number with a comma.
_NUMBER: Final = re.compile(
    r"[-+]?[$€£¥]?\s*[-+]?\d{1,3}(?:[.,\s]?\d{3})*(?:[.,]\d+)?\s*(?:%|[$€£¥])?"
)
# Fewer numbers are names of grades or ranges, unless some have a fraction.
_FEWEST_NUMBERS: Final = 21
_FEWEST_FRACTIONS: Final = 4
_FRACTION: Final = re.compile(r"\d[.,]\d{1,2}\b(?!\d)")


def unlabelled_marks(names: Collection[str]) -> list[str]:
    """Return the labels that mark records without one, and are hardly classes, in alphabetical order.

    yes, no, -       →  -
    +, -             →  nothing: all of them are signs
    """
    are_signs = [name for name in names if _SIGNS.issuperset(name)]
    marks = [name for name in names if _written(name) in _NO_LABEL]
    if len(are_signs) == 1 and len(names) > 1:
        marks += are_signs
    return sorted(set(marks))


def unlabelled_words(names: Collection[str]) -> list[str]:
    """Return the labels that may mark records without one, or be a class as the others."""
    return [name for name in names if _written(name) in _MAY_BE_NO_LABEL]


def _written(name: str) -> str:
    """Return a name as the lists above have it: `Not_Labelled` as `not labelled`."""
    return re.sub(r"[\s_-]+", " ", name).strip(" ()[]").casefold()


def marks_among_numbers(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the numbers to predict that mark rows without one, each with its rows: -999 beside 0.5 to 3.75.

    A mark is written with nines, or is -1, and lies far from all other numbers. `counts`: rows by number.
    """
    marks = [name for name in counts if _MARK.fullmatch(name)]
    others = [float(name) for name in counts if name not in marks]
    if not others:
        return {}
    far = _FAR * (max(others) - min(others))
    return {
        mark: counts[mark]
        for mark in marks
        if not min(others) - far <= float(mark) <= max(others) + far
    }


def joined_labels(names: Collection[str]) -> dict[str, list[str]]:
    """Return the labels that are several classes in one text, each with these classes.

    joy, fear, fear|joy           →  fear|joy: each part is a label of its own
    a;b, b;c, c;a                 →  all three: the same parts stand at several places
    news/sport, news/politics     →  nothing: a class with its kind
    """
    joined = {}
    for sign in _SEPARATORS:
        parts_of = {}
        for name in names:
            parts = [part.strip() for part in name.split(sign)]
            if len(parts) > 1 and all(parts) and len(set(parts)) == len(parts):
                parts_of[name] = parts

        places: dict[str, set[int]] = {}
        for parts in parts_of.values():
            for place, part in enumerate(parts):
                places.setdefault(part, set()).add(place)
        for name, parts in parts_of.items():
            if all(part in names or len(places[part]) > 1 for part in parts):
                joined[name] = parts
    return joined


def spelt_numbers(names: Collection[str]) -> list[str]:
    """Return the labels if nearly all of them are numbers to predict in a spelling that is not read, such as `31%`."""
    spelt = [name for name in names if _NUMBER.fullmatch(name) and number_of(name) is None]
    fewest = _FEWEST_NUMBERS
    if any(_FRACTION.search(name) for name in spelt):
        fewest = _FEWEST_FRACTIONS
    return spelt if len(spelt) >= max(fewest, 0.9 * len(names)) else []
