"""The right answer beside another one: a record whose reading would learn what somebody else answered is refused.

{"question": …, "answer": "It is 12", "ground_truth": "11"}            refused: nothing says which is to be learned
{"question": …, "answer": "10 + 1 is 11", "final_answer": "11"}        the answer says the right one
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from kubetune.data.choices import Choices, choices_of
from kubetune.data.column_names import ANSWERS, COMPLETIONS, PROMPTS, TALKS, names_truth
from kubetune.data.column_words import in_words, in_yaml
from kubetune.data.record_values import RecordValue, is_empty, key_of

# Names that a class or a language has too.
_UNSURE: Final = ("target", "gold")
# A letter, as one of several choices has it.
_MARK: Final = r"[A-J]"


class TwoAnswers(NamedTuple):
    """The columns of two answers that differ."""

    learned: str
    right: str


def two_answers(value: RecordValue, columns: Mapping[str, str]) -> TwoAnswers | None:
    """Return the answer that is learned of a record, and the right one beside it that says something else; None without.

    A `solution` is believed before both. `columns` decide if they name an answer.
    """
    if not columns.keys().isdisjoint((*ANSWERS, *TALKS, "text")) or key_of(TALKS, value, {}):
        return None
    learned = key_of(COMPLETIONS, value, {})
    question = key_of(PROMPTS, value, {})
    answer = value.get(learned)
    if not question or question == learned or not isinstance(answer, str):
        return None
    for right, truth in value.items():
        if not names_truth(right) or isinstance(truth, bool) or is_empty(truth):
            continue
        if not isinstance(truth, (str, int, float)):
            continue
        if right.lower() in _UNSURE and not _may_be_compared(answer, truth):
            continue
        choices = choices_of(value, question, truth)
        if choices is not None:
            answer = _chosen(answer, choices)
            truth = _chosen(str(truth), choices)
        if not _agree(answer, str(truth)):
            return TwoAnswers(learned, right)
    return None


def require_right_answer(
    value: RecordValue,
    columns: Mapping[str, str],
    names: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise ValueError for a record with two answers that differ, of which the right one would be left out.

    `columns`: of the run file. `names`: the file's, by those of the record, where somebody else than the user chose them.
    """
    answers = two_answers(value, columns)
    if answers is None:
        return
    all_columns = {**columns, **names}
    learned = all_columns.get(answers.learned, answers.learned)
    of_right = {**all_columns, answers.learned: answers.right}
    of_other = {**all_columns, answers.learned: learned}
    to_learn = f"give `{in_yaml(of_right)}` (`{in_words(of_right)}` beside `--data`) to learn the right answer"
    if not isinstance(value[answers.right], str):
        to_learn = f"write the right answer as a text into `{learned}`"
    raise ValueError(
        f"has `{learned}` beside `{answers.right}`, and they differ; {to_learn}, or give `{in_yaml(of_other)}` to learn "
        "the other"
    )


def _chosen(answer: str, choices: Choices) -> str:
    """Return the text of the choice that an answer names by its mark; an answer that names none as it is."""
    mark = answer.strip().upper()
    return choices.texts[choices.marks.index(mark)] if mark in choices.marks else answer


def _may_be_compared(answer: str, truth: Any) -> bool:
    """True for two texts of a word or two sentences: beside a sentence, one word may be its language or its class."""
    if not isinstance(truth, str):
        return len(_words(answer)) == 1
    return (len(_words(answer)) > 1) == (len(_words(truth)) > 1)


def _agree(answer: str, truth: str) -> bool:
    """True if one of two answers says the other, by its words and numbers: `10 + 1 = 11.0` says `11`."""
    words = _words(answer)
    of_truth = _words(truth)
    if _holds(words, of_truth) or _holds(of_truth, words):
        return True
    # Chinese and its like have no spaces between words.
    if not truth.isascii() and truth.strip() in answer:
        return True
    # The letter of a choice says nothing of its text.
    is_mark = re.fullmatch(_MARK, truth.strip()) is not None
    return is_mark and re.search(rf"\b{_MARK}\b(?=\W*$|[).:])", answer) is None


def _holds(words: list[str], part: list[str]) -> bool:
    """True if words follow each other in a text as they do in its part."""
    places = range(len(words) - len(part) + 1)
    return any(words[place : place + len(part)] == part for place in places)


def _words(text: str) -> list[str]:
    r"""Return the words and numbers of a text, as one compares them: `\frac{1}{2}` and `1/2` are the same."""
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text.lower())
    text = re.sub(r"\\[a-z]+|\\,", " ", text)
    words = []
    for word in re.findall(r"(?<![\w)])-?\d+(?:\.\d+)?|[^\W\d_]+|\d+(?:\.\d+)?", text):
        is_decimal = "." in word
        words.append(word.rstrip("0").rstrip(".") if is_decimal else word)
    return words
