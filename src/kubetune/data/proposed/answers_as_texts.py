"""Answers that are no texts: a number, an object, a choice among several. What to run so that they can be learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kubetune.data.choices import choices_of
from kubetune.data.column_names import (
    ANSWERS,
    PROMPTS,
    names_bad_answer,
    names_metadata,
    words_of_name,
)
from kubetune.data.proposed.multiple_choice import from_choices
from kubetune.data.proposed.programs import literal, program
from kubetune.data.proposed.text_places import (
    Place,
    is_first_right,
    is_structured,
    place_of_question,
    place_of_text,
    questions_in_list,
)
from kubetune.data.reading.fields import quoted, show
from kubetune.data.record_values import key_of

Value = Mapping[str, Any]

# Words of names of answers that may be wrong.
_DOUBTFUL: Final = frozenset((
    "possible", "plausible", "candidate", "other", "alternative", "option", "choice", "distractor", "all", "generated",
    "sampled", "predicted", "student",
))  # fmt: skip
# Words of names of the right answer.
_RIGHT: Final = frozenset(("right", "correct", "gold", "true", "truth", "reference", "expected"))


def as_text(values: Sequence[Value], columns: Mapping[str, str], path: str) -> str:
    """Return how answers that are no texts become some; empty for answers that are texts."""
    name = key_of(ANSWERS, values[0], columns)
    answer = values[0].get(name)
    if not name or isinstance(answer, str):
        return ""
    several = _several_questions(values, path)
    if several:
        return several
    question = place_of_question(values, columns)
    text = f"{path}: `{name}` is {show(answer)}, no text; answers are learned as texts"
    if not isinstance(answer, (list, Mapping)):
        choice = from_choices(values, question, path) if question is not None else ""
        are_numbers = all(isinstance(value.get(name), (bool, int, float)) for value in values)
        if choice or not are_numbers:
            return choice or f"{text}. Write them as such"
        return f"{text}. {program(path, {name: f'json.dumps(r[{literal(name)}])'})}"

    place = place_of_text(values, name)
    if place is None and question is not None and is_structured(values, name):
        new = f"json.dumps(r[{literal(name)}], ensure_ascii=False)"
        return f"{text}. If all of it is the answer, it is learned as JSON. {program(path, {name: new})}"
    if place is None:
        part = "Write the part of it that is the right answer there as a text"
        return f"{text}. {part}, or all of it as JSON if that is the answer"
    # All that are marked of several choices are one answer.
    are_marked = place.has_several(values) and choices_of(values[0], "", answer) is not None
    if are_marked or not is_first_right(values, place):
        return f"{path}: {in_several_answers([name])}"
    new_columns = {**_new_columns_of(question), name: place.code}
    return f"{text}. {_if_several(values, place)}{program(path, new_columns)}"


def from_parts(values: Sequence[Value], path: str) -> str:
    """Return how answers become texts that only a list or an object of a record holds; empty for other records.

    {"ctx": …, "endings": ["a", "b"], "label": "1"}                    →  r["endings"][int(r["label"])]
    {"question": …, "choices": {"text": [], "label": []}, "answerKey": "B"}
    {"question": …, "answers": {"text": ["Paris"], …}}                 →  r["answers"]["text"][0]
    """
    several = _several_questions(values, path)
    if several:
        return several
    question = place_of_question(values, {})
    if question is None:
        return ""
    choice = from_choices(values, question, path)
    if choice or any(isinstance(values[0].get(name), str) for name in ANSWERS):
        return choice

    places = _answers_in(values)
    least = min((_doubt(place.column) for place in places), default=0)
    places = [place for place in places if _doubt(place.column) == least]
    # The columns of a text need no program.
    if len(places) != 1 or len(places[0].keys) == 1:
        return ""
    place = places[0]
    if not is_first_right(values, place):
        return f"{path}: {in_several_answers([place.column])}"
    text = (
        f"{path}: `{place.column}` holds the answer, and is no text; answers are learned as texts"
    )
    new_columns = {**_new_columns_of(question), "answer": place.code}
    if question.column not in PROMPTS:
        new_columns = {"prompt": question.code, **new_columns}
    return f"{text}. {_if_several(values, place)}{program(path, new_columns)}"


def _if_several(values: Sequence[Value], place: Place) -> str:
    """Return the sentence about the first of several answers; empty where no record has several."""
    if not place.has_several(values):
        return ""
    return "Of several the first is learned, which holds if each is right by itself. "


def in_several_answers(names: Sequence[str]) -> str:
    """Return what a user should do with several answers to one prompt."""
    return (
        f"{quoted(names)} seem to be several answers to one prompt: write a record for each, with `prompt` "
        "and `completion`, or the better one as `chosen` and the other as `rejected`"
    )


def _several_questions(values: Sequence[Value], path: str) -> str:
    """Return what a user should do with several questions in a list; empty where a record has one at most."""
    name = questions_in_list(values)
    if not name:
        return ""
    return (
        f"{path}: `{name}` holds several questions of a record: write a record for each, with what it is about in its "
        "`prompt`, and its answer as `completion`"
    )


def _new_columns_of(question: Place | None) -> dict[str, str]:
    """Return the column for a question that is within an object; none for one that is read as it is."""
    if question is None or len(question.keys) == 1:
        return {}
    return {question.column if question.column in PROMPTS else "prompt": question.code}


def _answers_in(values: Sequence[Value]) -> list[Place]:
    """Return where the texts of columns are that are called like an answer."""
    places = []
    for name in values[0]:
        words = words_of_name(name)
        if set(ANSWERS).isdisjoint(words) or not _DOUBTFUL.isdisjoint(words):
            continue
        if names_bad_answer(name) or names_metadata(name):
            continue
        place = place_of_text(values, name)
        if place is None:
            continue
        texts = {place.of(value) for value in values}
        # The same few texts are kinds of answers.
        if len(place.keys) > 1 or 2 * len(texts) > len(values):
            places.append(place)
    return places


def _doubt(name: str) -> int:
    """Return how little the name of a column says that it holds the right answer."""
    words = words_of_name(name)
    if "best" in words:
        return 0
    if not _RIGHT.isdisjoint(words):
        return 1
    return 2 if words == ("answer",) else 3
