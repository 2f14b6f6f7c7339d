"""Choices that the answer to a question is one of: columns such as `A`, `B`, `C` and `D`, or a list of texts.

{"question": …, "A": "Paris", "B": "Rome", "answer": "B"}
{"question": …, "options": ["Paris", "Rome"], "answer": "Rome"}
{"question": …, "choices": {"label": ["A", "B"], "text": ["Paris", "Rome"]}, "answer": "B"}
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

from kubetune.data.column_names import TALKS, names_answer, names_thought, words_of_name

# Last words of names of choices; a column without any other word is called `A`.
_SURE: Final = frozenset(("choice", "option", "opt", "op", "alternative"))
# Words of names of lists that an answer may occur in, and that are no choices; `aliases` without its s is aliase.
_OTHER_NAMES: Final = frozenset(
    ("alias", "aliase", "keyword", "tag", "synonym", "entity", "entitie")
)
_NO_CHOICES: Final = frozenset((*TALKS, "history", "tools", "functions", "images"))
_MOST: Final = 26


# How a record holds choices:
#
#     columns   {"A": "Paris", "B": "Rome"}
#     texts     {"options": ["Paris", "Rome"]}
#     lists     {"options": {"label": ["A", "B"], "text": ["Paris", "Rome"]}}
#     marked    {"options": {"A": "Paris", "B": "Rome"}}
#     objects   {"options": [{"key": "A", "text": "Paris"}, {"key": "B", "text": "Rome"}]}
Form = Literal["columns", "texts", "lists", "marked", "objects"]


class Choices(NamedTuple):
    """The choices of one record."""

    columns: tuple[str, ...]  # ("options",), or ("A", "B", "C", "D")
    marks: tuple[str, ...]  # by which an answer may name them
    texts: tuple[str, ...]
    form: Form
    mark_key: str = ""  # of the mark in each of `objects`


def choices_of(value: Mapping[str, Any], question: str, answer: Any) -> Choices | None:
    """Return the choices that stand beside a question; None without any. `answer`: to that question."""
    for choices, is_sure in _candidates(value):
        if question in choices.columns:
            continue
        # A single letter may be anything; three in a row are choices.
        is_known = is_sure and (choices.columns[0] != "A" or len(choices.texts) > 2)
        if is_known or _names_one(answer, choices, with_numbers=is_sure):
            return choices
    return None


def are_marked(choices: Choices) -> bool:
    """True if each text begins with its mark: `A) 21`, `(B) 22`, `C. 23`."""
    for mark, text in zip(choices.marks, choices.texts, strict=True):
        if not re.match(rf"\(?{re.escape(mark)} ?[.):]", text, re.IGNORECASE):
            return False
    return True


def chosen_by_label(
    values: Sequence[Mapping[str, Any]], question: str, label: str
) -> list[tuple[Any, Choices]]:
    """Return label and choices of each record; empty where the labels choose from none.

    {"question": …, "options": ["Paris", "Rome"], "label": "B"}   by the name of the list, or by what the label says
    {"question": …, "all_answers": ["a", "b"], "label": 1}        by what the label says of a list of answers
    {"ctx": …, "endings": ["a", "b"], "label": 1}                 by the places of its texts, whatever it is called
    """
    chosen = []
    for value in values:
        choices = choices_of(value, question, value.get(label))
        if choices is not None:
            chosen.append((value.get(label), choices))
    if len(chosen) == len(values):
        return chosen

    for name in values[0]:
        chosen = []
        for value in values:
            item = value.get(name)
            choices = _in_column(name, item) if isinstance(item, list) else None
            if choices is not None:
                chosen.append((value.get(label), choices))
        if len(chosen) < len(values) or names_other_texts(name):
            continue
        is_chosen_from = names_answer(name) and right_choice(chosen) is not None
        if is_chosen_from or _are_places(chosen):
            return chosen
    return []


def _are_places(chosen: Sequence[tuple[Any, Choices]]) -> bool:
    """True if lists have the same number of texts in each record, and each place is a label somewhere."""
    sizes = {len(choices.texts) for _, choices in chosen}
    numbers = {str(label).strip() for label, _ in chosen}
    if len(sizes) > 1 or not all(re.fullmatch(r"\d{1,2}", number, re.ASCII) for number in numbers):
        return False
    size = sizes.pop()
    places = {int(number) for number in numbers}
    return places in (set(range(size)), set(range(1, size + 1)))


def _candidates(value: Mapping[str, Any]) -> Iterator[tuple[Choices, bool]]:
    """Yield what may be choices, by its shape, and True where the names say so too."""
    for stem, columns, marks in _runs(tuple(value)):
        texts = []
        for column in columns:
            text = value[column]
            if isinstance(text, (str, int, float)) and str(text).strip():
                texts.append(str(text).strip())
        if len(texts) == len(columns):
            is_sure = not stem or _is_sure(stem)
            yield Choices(columns, marks, tuple(texts), "columns"), is_sure

    for name, item in value.items():
        if not isinstance(item, (list, Mapping)) or name in _NO_CHOICES:
            continue
        if names_answer(name) or names_thought(name):
            continue
        if names_other_texts(name):
            continue
        choices = _in_column(name, item)
        if choices is not None:
            yield choices, _is_sure(name)


def names_other_texts(name: str) -> bool:
    """True if a column is called like other words for something, or names within a text: `aliases`, `keywords`."""
    return not _OTHER_NAMES.isdisjoint(words_of_name(name))


def are_numbered(names: Sequence[str]) -> bool:
    """True for names that differ in a letter or number at their end alone: `text_a` and `text_b`."""
    return any(set(columns) == set(names) for _, columns, _ in _runs(tuple(names)))


def _is_sure(name: str) -> bool:
    words = words_of_name(name)
    return bool(words) and words[-1] in _SURE


@lru_cache(maxsize=64)
def _runs(names: tuple[str, ...]) -> tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]:
    """Return columns whose names differ in a letter or number at their end, which count from A, 0 or 1.

    ("question", "opt_a", "opt_b", "answer")  →  (("opt", ("opt_a", "opt_b"), ("A", "B")),)
    """
    by_stem: dict[str, dict[str, str]] = {}
    for name in names:
        match = re.fullmatch(r"(.*?)[_ -]?([A-Za-z]|\d{1,2})", name, re.ASCII)
        if match:
            by_stem.setdefault(match[1], {})[match[2].upper()] = name

    runs = []
    for stem, by_mark in by_stem.items():
        for marks in (string.ascii_uppercase, "0123456789", "123456789"):
            number = next((i for i, mark in enumerate(marks) if mark not in by_mark), len(marks))
            if number > 1:
                columns = tuple(by_mark[mark] for mark in marks[:number])
                runs.append((stem, columns, tuple(marks[:number])))
                break
    return tuple(runs)


class _Listed(NamedTuple):
    """What may be marks and texts: nobody has looked at their types or their number."""

    marks: Sequence[Any]
    texts: Sequence[Any]
    form: Form
    mark_key: str = ""


def _in_column(name: str, item: Any) -> Choices | None:
    """Return the choices that a list or an object in a column holds; None for anything else."""
    listed = _of_object(item) if isinstance(item, Mapping) else _of_list(item)
    if listed is None:
        return None

    if not 2 <= len(listed.texts) <= min(len(listed.marks), _MOST):
        return None
    if not all(_may_be_chosen(text, is_sure=_is_sure(name)) for text in listed.texts):
        return None
    marks = tuple(str(mark).upper() for mark in listed.marks[: len(listed.texts)])
    texts = tuple(str(text).strip() for text in listed.texts)
    return Choices((name,), marks, texts, listed.form, listed.mark_key)


def _may_be_chosen(text: Any, *, is_sure: bool) -> bool:
    """True for a text, and for a number where the name says that it is a choice; other numbers are scores."""
    if isinstance(text, str):
        return bool(text.strip())
    return is_sure and isinstance(text, (int, float)) and not isinstance(text, bool)


def _of_object(item: Mapping[str, Any]) -> _Listed | None:
    """Return the marks and texts of an object: two lists of them, or texts by their marks."""
    labels = item.get("label")
    texts = item.get("text")
    if isinstance(labels, list) and isinstance(texts, list):
        return _Listed(labels, texts, "lists")
    if all(re.fullmatch(r"[A-Za-z]|\d", str(key), re.ASCII) for key in item):
        return _Listed(list(item), list(item.values()), "marked")
    return None


def _of_list(item: Sequence[Any]) -> _Listed | None:
    """Return the marks and texts of a list of texts, or of objects that have both."""
    if not all(isinstance(part, Mapping) for part in item):
        return _Listed(string.ascii_uppercase, item, "texts")
    for key in ("label", "key", "id"):
        if item and key in item[0]:
            if not all(key in part and "text" in part for part in item):
                return None
            marks = [part[key] for part in item]
            texts = [part["text"] for part in item]
            return _Listed(marks, texts, "objects", key)
    return None


class RightChoice(NamedTuple):
    """How the labels of records say which of their choices are right."""

    by: Literal["text", "mark", "number"]
    texts: tuple[str, ...]  # the right one of each record
    first: int = 0  # number of the first choice


def right_choice(chosen: Sequence[tuple[Any, Choices]]) -> RightChoice | None:
    """Return how labels choose; None for labels that are neither texts, marks nor numbers, or do not tell which.

    `chosen`: the label and the choices of each record.
    """
    named = [(str(label).strip(), choices) for label, choices in chosen]
    if all(label in choices.texts for label, choices in named):
        return RightChoice("text", tuple(label for label, _ in named))
    are_numbers = all(_is_number(label) for label, _ in named)
    are_counted = all(choices.marks in _counts(choices) for _, choices in named)
    if not are_numbers or not are_counted:
        if not all(label.upper() in choices.marks for label, choices in named):
            return None
        texts = [choices.texts[choices.marks.index(label.upper())] for label, choices in named]
        return RightChoice("mark", tuple(texts))

    # Labels may count from 0 where the choices are called 1 and 2.
    first = _first_number(named)
    if first is None:
        return None
    texts = []
    for label, choices in named:
        place = int(label) - first
        if not 0 <= place < len(choices.texts):
            return None
        texts.append(choices.texts[place])
    return RightChoice("number", tuple(texts), first)


def counted_from(values: Sequence[tuple[Any, Choices]]) -> int | None:
    """Return 0 or 1, from which answers that are numbers count; None for other answers, and where they do not tell.

    `values`: the answer and the choices of each record, where these are marked with letters.
    """
    named = [(str(answer).strip(), choices) for answer, choices in values]
    if any(not _is_number(answer) or choices.marks[0] != "A" for answer, choices in named):
        return None
    return _first_number(named)


def _is_number(label: str) -> bool:
    return re.fullmatch(r"\d{1,2}", label, re.ASCII) is not None


def _counts(choices: Choices) -> Iterator[tuple[str, ...]]:
    """Yield the marks that so many choices have if these are counted: with letters, from 0 and from 1."""
    size = len(choices.marks)
    yield tuple(string.ascii_uppercase[:size])
    yield tuple(map(str, range(size)))
    yield tuple(map(str, range(1, size + 1)))


def _first_number(named: Sequence[tuple[str, Choices]]) -> int | None:
    """Return 0 or 1, by which number numbers begin; None where they do not tell."""
    if any(int(number) == len(choices.texts) for number, choices in named):
        return 1
    if any(int(number) == 0 or choices.marks[0] == "0" for number, choices in named):
        return 0
    return None


def _names_one(answer: Any, choices: Choices, *, with_numbers: bool) -> bool:
    """True if an answer is a choice, or begins with its mark: `B`, `(b)`, `B. Rome`.

    `with_numbers`: a number may stand for a choice; without, it may be anything else.
    """
    if isinstance(answer, bool) or not isinstance(answer, (str, int)):
        return False
    text = str(answer).strip()
    if text in choices.texts and not names_answer(choices.columns[0]):
        return True

    match = re.match(r"\(?([A-Za-z]|\d{1,2})(?=[.):]|$)", text, re.ASCII)
    if match is None:
        return False
    mark = match[1].upper()
    if mark.isdigit():
        return with_numbers and (mark in choices.marks or int(mark) <= len(choices.texts))
    return mark in choices.marks
