"""Records of `task: grpo`: a prompt, which the model answers itself, and the right answer where the record has one.

A record becomes one that other shapes read, with an answer: the right one, under whatever name it is, or NO_ANSWER.

    {"prompt": "2 + 2?", "solution": 4}         →  prompt "2 + 2?", completion "4"
    {"messages": [{"role": "user", …}]}         →  the same with one more message, of the assistant
    {"question": "2 + 2?", "answer": "4"}       →  as it is
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from kubetune.data.column_names import COMPLETIONS, RIGHT_ANSWERS, TALKS
from kubetune.data.reading.fields import parsed
from kubetune.data.record_values import RecordValue

# Stands for the answer of a record that has none; a text of one character that nobody writes.
NO_ANSWER: Final = "\N{WORD JOINER}"

# verl's records have the right answer below this column.
_BELOW: Final = "reward_model"
_ASSISTANTS: Final = ("assistant", "gpt", "model")


def right_answer(value: RecordValue, column: str | None = None) -> str | None:
    """Return the right answer of a record as a text, or None where it has none.

    `column` names where it is. Numbers are written as Python writes them. verl's records have it one level below.
    """
    return _right_answer(value, RIGHT_ANSWERS if column is None else (column,))[1]


def _right_answer(value: RecordValue, names: Sequence[str]) -> tuple[str, str | None]:
    """Return the column that the right answer is in, or below, and the answer; an empty name and None without one."""
    below = value.get(_BELOW)
    for place in (value, below if isinstance(below, Mapping) else {}):
        for name in names:
            reference = place.get(name)
            column = name if place is value else _BELOW
            if isinstance(reference, str) and reference.strip():
                return column, reference
            if isinstance(reference, (int, float)) and not isinstance(reference, bool):
                return column, str(reference)
    return "", None


class Answered(NamedTuple):
    """A record that has an answer, as the top of this file shows."""

    value: RecordValue
    others: Sequence[str] = ()  # columns with other answers, which are left aside
    # the file's name for each column that is made here; empty where the file has none
    columns: Mapping[str, str] = MappingProxyType({})


def with_answer(value: RecordValue) -> Answered:
    """Return a record with the right answer as its answer, or with NO_ANSWER."""
    column, answer = _right_answer(value, RIGHT_ANSWERS)
    for key in TALKS:
        turns = value.get(key)
        if turns is not None:
            ended = _with_last_turn(key, turns, answer or NO_ANSWER)
            if ended is None:
                return Answered(value)
            return Answered({**_without(value, (column,)), key: ended})
    if any(value.get(name) not in (None, "") for name in COMPLETIONS):
        return Answered(value)
    # Names of answers that hold nothing would be in the way, and those of the right one would be a second answer.
    taken = (*COMPLETIONS, *RIGHT_ANSWERS)
    others = [name for name in taken if value.get(name) not in (None, "") and name != column]
    rest = _without(value, (*taken, column))
    made = {**rest, "completion": answer or NO_ANSWER}
    return Answered(made, others, {"completion": column})


def _without(value: RecordValue, names: Sequence[str]) -> RecordValue:
    return {name: item for name, item in value.items() if name not in names}


def _with_last_turn(key: str, turns: Any, answer: str) -> list[Any] | None:
    """Return messages with an answer at their end; None if they end with one, or are no messages."""
    # Tables hold lists as JSON.
    if isinstance(turns, str):
        turns = parsed(turns, key)
    if not isinstance(turns, list) or not turns or not isinstance(turns[-1], Mapping):
        return None  # whoever reads it says what is wrong with it
    last = turns[-1]
    speaker = last.get("role", last.get("from"))
    if speaker in _ASSISTANTS:
        return None
    # In the spelling of the other messages.
    turn = {"role": "assistant", "content": answer}
    if "role" not in last:
        turn = {"from": "gpt", "value": answer}
    return [*turns, turn]
