"""Where a text is that a column holds within a list or an object, and whether that text may be learned as an answer.

{"answer": {"aliases": ["kettle", "pot"], "value": "kettle"}}         →  r["answer"]["value"]
{"answers": {"a_id": ["e7bfb3"], "text": ["As water boils."]}}        →  r["answers"]["text"][0]
{"answers": [{"text": "As water boils.", "answer_start": 14}]}        →  r["answers"][0]["text"]
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from kubetune.data.choices import names_other_texts
from kubetune.data.column_names import (
    PROMPTS,
    QUESTIONS,
    names_answer,
    names_bad_answer,
    names_metadata,
    words_of_name,
)
from kubetune.data.proposed.programs import literal
from kubetune.data.record_values import (
    count_words,
    is_held,
    is_prose,
    is_word_for_none,
    key_of,
)

Value = Mapping[str, Any]

# Last words of names of the text of an object, in the order in which they are believed.
_PARTS: Final = ("text", "value", "answer", "response", "content", "span")
# Words of names of what says which of several answers is a good one.
_WORTHS: Final = frozenset((
    "score", "vote", "upvote", "like", "rating", "rank", "grade", "reward", "quality", "label", "correct", "correctness",
    "preference", "accepted",
))  # fmt: skip
# Words of names of questions; `queries` without its s is querie.
_QUESTIONS: Final = frozenset((*QUESTIONS, "prompt", "querie"))
_MARKS_OF_QUESTIONS: Final = ("?", "？", "؟")
# Share of records in which an answer may be a word for none.
_FEW: Final = 0.1


class Place(NamedTuple):
    """Where a value is in a record: ("answers", "text", 0) is r["answers"]["text"][0]."""

    keys: tuple[str | int, ...]

    @property
    def column(self) -> str:
        """The column that it is in."""
        return str(self.keys[0])

    @property
    def part(self) -> str:
        """The part of an object that it is; empty for a text that is in no object."""
        return next((key for key in self.keys[1:] if isinstance(key, str)), "")

    @property
    def code(self) -> str:
        """The value in Python, of a record r."""
        return "r" + "".join(f"[{literal(key)}]" for key in self.keys)

    def of(self, value: Value) -> Any:
        """Return what a record has there; None for nothing."""
        item: Any = value
        for key in self.keys:
            if isinstance(key, int) and isinstance(item, list):
                item = item[key] if key < len(item) else None
            elif isinstance(key, str) and isinstance(item, Mapping):
                item = item.get(key)
            else:
                return None
        return item

    def number_in(self, value: Value) -> int:
        """Return how many values there are of which this is the first; 1 for a place that is in no list."""
        if 0 not in self.keys:
            return 1
        return len(Place(self.keys[: self.keys.index(0)]).of(value) or ())

    def has_several(self, values: Sequence[Value]) -> bool:
        """True if it is the first of several values in some record."""
        return any(self.number_in(value) > 1 for value in values)


def place_of_text(values: Sequence[Value], name: str) -> Place | None:
    """Return where the text of a column is in all records, if one can be told from the others; None without one."""
    sure = []
    unsure = []
    for place in _places_in(values, name):
        key = place.part
        words = words_of_name(key)
        texts = [place.of(value) for value in values]
        if names_other_texts(key) or names_metadata(key, _mean_words(texts)):
            continue
        if not are_answers(texts):
            continue
        if not words:
            sure.append((0, 0, place))
        elif words[-1] in _PARTS:
            sure.append((_PARTS.index(words[-1]), len(words), place))
        # The same few texts are kinds of answers.
        elif 2 * len(set(texts)) > len(texts) and _is_alone(values, place):
            unsure.append(place)
    if sure:
        return min(sure, key=lambda item: item[:2])[2]
    return unsure[0] if len(unsure) == 1 else None


def _is_alone(values: Sequence[Value], place: Place) -> bool:
    """True if an object holds nothing beside a text but ids, other words for it and numbers."""
    for value in values:
        item = Place(place.keys[: place.keys.index(place.part)]).of(value)
        for key, part in item.items():
            is_aside = names_metadata(key, count_words(part)) or names_other_texts(key)
            if key != place.part and not is_aside and count_words(part):
                return False
    return True


def is_structured(values: Sequence[Value], name: str) -> bool:
    """True if a column may be learned as JSON: objects of which no part is an id, or called like the answer itself."""
    for value in values:
        item = value.get(name)
        items = item if isinstance(item, list) else [item]
        objects = [part for part in items if isinstance(part, Mapping) and part]
        if not objects or len(objects) < len(items):
            return False
        for key in (key for part in objects for key in part):
            # Columns of a table have a value by the number of each row.
            if key.isdigit():
                return False
            words = words_of_name(key)
            is_called_so = bool(words) and words[-1] in _PARTS
            if is_called_so or names_metadata(key) or names_other_texts(key):
                return False
    return True


def _places_in(values: Sequence[Value], name: str) -> list[Place]:
    """Return the places in a column and one level below it that hold a text in each record."""
    item = values[0].get(name)
    places = [Place((name,))]
    if isinstance(item, list):
        places = [Place((name, 0))]
        if item and isinstance(item[0], Mapping):
            places = [Place((name, 0, key)) for key in item[0]]
    elif isinstance(item, Mapping):
        places = []
        for key, inner in item.items():
            places.append(Place((name, key, 0) if isinstance(inner, list) else (name, key)))
    return [place for place in places if all(_is_text(place.of(value)) for value in values)]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _mean_words(texts: Sequence[str]) -> float:
    return sum(map(count_words, texts)) / len(texts)


def are_answers(texts: Sequence[str]) -> bool:
    """True for texts that may be learned: not ids, not words for none, no objects written as JSON."""
    missing = sum(map(is_word_for_none, texts))
    if missing > _FEW * len(texts) or all(map(_is_object, texts)):
        return False
    ids = sum(map(_may_be_id, texts))
    return 2 * ids < len(texts) or any(any(map(str.isspace, text.strip())) for text in texts)


def _may_be_id(text: str) -> bool:
    """True for a text of both letters and digits, such as e7bfb3."""
    return any(map(str.isalpha, text)) and any(map(str.isdigit, text))


def _is_object(text: str) -> bool:
    """True for an object or a list written as JSON."""
    if not text.lstrip().startswith(("{", "[")):
        return False
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def is_first_right(values: Sequence[Value], place: Place) -> bool:
    """True if the text of a place is a right answer: the only one, or the first of which none is told to be better."""
    if not place.has_several(values):
        return True
    # Several completions are attempts; several answers of a question are right, unless something tells them apart.
    if "answer" not in words_of_name(place.column):
        return False
    return all(_is_first_best(value, place) for value in values)


def _is_first_best(value: Value, place: Place) -> bool:
    """True if nothing beside several answers of a record says that another than the first is better."""
    number = place.number_in(value)
    item = value[place.column]
    beside = {name: other for name, other in value.items() if name != place.column}
    if isinstance(item, Mapping):
        beside |= item
    elif isinstance(item[0], Mapping):
        # Messages of a conversation follow one another.
        if number > 1 and not {"role", "from"}.isdisjoint(item[0]):
            return False
        for key in item[0]:
            beside[key] = [part.get(key) if isinstance(part, Mapping) else None for part in item]

    for name, worths in beside.items():
        words = words_of_name(name)
        if _WORTHS.isdisjoint(words) or not isinstance(worths, list) or len(worths) != number:
            continue
        if not all(isinstance(worth, (bool, int, float)) for worth in worths):
            continue
        best = min(worths) if "rank" in words else max(worths)
        if worths[0] != best:
            return False
    return True


def place_of_question(values: Sequence[Value], columns: Mapping[str, str]) -> Place | None:
    """Return where the question of each record is: by its name, else by what it says; None where that does not tell."""
    name = key_of(PROMPTS, values[0], columns)
    if name and all(isinstance(value.get(name), str) for value in values):
        return Place((name,))
    if name:
        place = place_of_text(values, name)
        return None if place is None or place.has_several(values) else place

    texts: dict[str, list[str]] = {}
    for name in values[0]:
        of_column = [str(value[name]) for value in values if _is_text(value.get(name))]
        if len(of_column) < len(values) or 2 * sum(map(is_prose, of_column)) < len(values):
            continue
        if not names_metadata(name, _mean_words(of_column)) and not names_answer(name):
            texts[name] = of_column
    named = [name for name in texts if names_question(name)]
    asking = [name for name, of_column in texts.items() if _ask(of_column)]
    for names in (named, asking):
        if len(names) == 1:
            return Place((names[0],))
    return _only_text(texts)


def _only_text(texts: Mapping[str, Sequence[str]]) -> Place | None:
    """Return the only text that differs and is no part of another one; None for several."""
    others = []
    for name, of_column in texts.items():
        is_part = any(
            all(is_held(text, [whole]) for text, whole in zip(of_column, texts[other], strict=True))
            for other in texts
            if other != name
        )
        is_class = 2 * len(set(of_column)) <= len(of_column)
        if not is_part and not is_class and not names_bad_answer(name):
            others.append(name)
    return Place((others[0],)) if len(others) == 1 else None


def names_question(name: str) -> bool:
    """True if a column is called like a question: `question_stem`, `user_query`."""
    return not _QUESTIONS.isdisjoint(words_of_name(name)) and not names_metadata(name)


def _ask(texts: Sequence[str]) -> bool:
    """True if most of these texts end with a question mark."""
    asking = sum(text.rstrip().endswith(_MARKS_OF_QUESTIONS) for text in texts)
    return 2 * asking > len(texts)


def questions_in_list(values: Sequence[Value]) -> str:
    """Return the column with several questions of a record in a list; empty without one."""
    for name in values[0]:
        if not names_question(name):
            continue
        for value in values:
            item = value.get(name)
            if isinstance(item, list) and len(item) > 1 and all(map(_is_text, item)):
                return name
    return ""
