"""Records of `task: grpo`: a prompt, which the model answers itself, and the right answer where the record has one.

A record becomes one that other shapes read, with an answer: the right one, under whatever name it is, or NO_ANSWER.

    {"prompt": "2 + 2?", "solution": 4}         →  prompt "2 + 2?", completion "4"
    {"messages": [{"role": "user", …}]}         →  the same with one more message, of the assistant
    {"question": "2 + 2?", "answer": "4"}       →  as it is
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kubetune.data.columns import COMPLETIONS, RecordValue
from kubetune.data.reading.fields import parsed

# Stands for the answer of a record that has none; a text of one character that nobody writes.
NO_ANSWER: Final = "\N{WORD JOINER}"

_REFERENCES: Final = (
    "solution", "ground_truth", "target", "answer", "reference_answer", "expected_answer", "final_answer",
)  # fmt: skip
_TALKS: Final = ("messages", "conversations")
_ASSISTANTS: Final = ("assistant", "gpt", "model")


def right_answer(value: RecordValue, column: str | None = None) -> str | None:
    """Return the right answer of a record as a text, or None where it has none.

    `column` names where it is. Numbers are written as Python writes them. verl's records have it one level below.
    """
    names = _REFERENCES if column is None else (column,)
    places = [value]
    below = value.get("reward_model")
    if isinstance(below, Mapping):
        places.append(below)
    for place in places:
        for name in names:
            reference = place.get(name)
            if isinstance(reference, str) and reference.strip():
                return reference
            if isinstance(reference, (int, float)) and not isinstance(reference, bool):
                return str(reference)

    return None


def with_answer(value: RecordValue) -> RecordValue:
    """Return a record that has an answer, as the top of this file shows."""
    for key in _TALKS:
        turns = value.get(key)
        if turns is not None:
            return _with_last_turn(value, key, turns)
    if any(value.get(name) not in (None, "") for name in COMPLETIONS):
        return value
    # Names of answers that hold nothing would be in the way, and those of the right one would be a second answer.
    taken = (*COMPLETIONS, *_REFERENCES)
    rest = {name: item for name, item in value.items() if name not in taken}
    return {**rest, "completion": right_answer(value) or NO_ANSWER}


def _with_last_turn(
    value: RecordValue,
    key: str,
    turns: Any,
) -> RecordValue:
    """Return a conversation that ends with an answer."""
    # Tables hold lists as JSON.
    if isinstance(turns, str):
        turns = parsed(turns, key)
    if not isinstance(turns, list) or not turns or not isinstance(turns[-1], Mapping):
        return value  # whoever reads it says what is wrong with it
    last = turns[-1]
    speaker = last.get("role", last.get("from"))
    if speaker in _ASSISTANTS:
        return value
    answer = right_answer(value) or NO_ANSWER

    # In the spelling of the other messages.
    turn = {"role": "assistant", "content": answer}
    if "role" not in last:
        turn = {"from": "gpt", "value": answer}
    return {**value, key: [*turns, turn]}
