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

from kubetune.data.column_names import ANSWERS, COMPLETIONS, PROMPTS, RIGHT_ANSWERS, TALKS, TRUTHS
from kubetune.data.column_words import in_yaml
from kubetune.data.reading.fields import parsed, quoted
from kubetune.data.record_values import RecordValue, key_of

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
            reference = _as_text(place.get(name))
            if reference is not None:
                return name if place is value else _BELOW, reference
    return "", None


def _as_text(answer: Any) -> str | None:
    """Return an answer as a text; None for what is none, or holds nothing."""
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        return str(answer)
    return answer if isinstance(answer, str) and answer.strip() else None


class Answered(NamedTuple):
    """A record that has an answer, as the top of this file shows."""

    value: RecordValue
    others: Sequence[str] = ()  # columns with other answers, which are left aside
    # the file's name for each column that is made here; empty where the file has none
    columns: Mapping[str, str] = MappingProxyType({})


def with_answer(value: RecordValue, columns: Mapping[str, str] = MappingProxyType({})) -> Answered:
    """Return a record with the right answer as its answer, or with NO_ANSWER.

    What is called the right answer is believed before what somebody or a model answered. Raise ValueError for two
    answers of which neither is called so. `columns`: of the run file, which decide.
    """
    named = next((name for name in ANSWERS if name in columns), "")
    column, answer = _right_answer(value, (named,) if named else RIGHT_ANSWERS)
    is_told = bool(named) or _right_answer(value, TRUTHS)[1] is not None
    if is_told and not named:
        # A `solution` comes before them, an `answer` after them.
        names = [name for name in (*RIGHT_ANSWERS, *TRUTHS) if name != "answer"]
        column, answer = _right_answer(value, names)

    for key in TALKS:
        turns = value.get(key)
        if turns is not None:
            return _with_last_turn(value, key, turns, column, answer)

    held = [name for name in ANSWERS if value.get(name) not in (None, "")]
    if held and not is_told:
        _require_one_answer(value, held)
    if any(name in COMPLETIONS for name in held) and (named or not is_told):
        return Answered(value)

    # Names of answers that hold nothing would be in the way, and those of the right one would be a second answer.
    taken = (*COMPLETIONS, *RIGHT_ANSWERS, *TRUTHS)
    others = [name for name in taken if value.get(name) not in (None, "") and name != column]
    rest = _without(value, (*taken, column))
    made = {**rest, "completion": answer or NO_ANSWER}
    return Answered(made, tuple(dict.fromkeys(others)), {"completion": column})


def _require_one_answer(value: RecordValue, held: Sequence[str]) -> None:
    """Raise ValueError for answers that differ: nothing says which of them is right."""
    if len({_as_text(value[name]) or str(value[name]) for name in held}) > 1:
        question = key_of(PROMPTS, value, {})
        key = "completion" if question == "prompt" else "output"
        asked = {} if question in ("prompt", "") else {"instruction": question}
        use = in_yaml({**asked, key: held[0]})
        raise ValueError(
            f"has {quoted(held)}; expected one right answer, or `data.train.columns` that say which it is, such as `{use}`"
        )


def _without(value: RecordValue, names: Sequence[str]) -> RecordValue:
    return {name: item for name, item in value.items() if name not in names}


def _with_last_turn(
    value: RecordValue, key: str, turns: Any, column: str, answer: str | None
) -> Answered:
    """Return a conversation that ends with the right answer, in place of another answer at its end."""
    # Tables hold lists as JSON.
    if isinstance(turns, str):
        turns = parsed(turns, key)
    if not isinstance(turns, list) or not turns or not isinstance(turns[-1], Mapping):
        return Answered(value)  # whoever reads it says what is wrong with it

    last = turns[-1]
    others = []
    if last.get("role", last.get("from")) in _ASSISTANTS:
        last_text = last.get("content", last.get("value"))
        if answer is None or last_text == answer:
            return Answered(value)
        turns = turns[:-1]
        others.append(f"{key}[-1]")

    # In the spelling of the other messages.
    turn = {"role": "assistant", "content": answer or NO_ANSWER}
    if "role" not in last:
        turn = {"from": "gpt", "value": answer or NO_ANSWER}
    return Answered({**_without(value, (column,)), key: [*turns, turn]}, others)
