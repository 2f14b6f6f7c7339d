"""Refuses records that hold what kubetune would pass over, where the rows would then not be what their author meant.

Other keys that nothing here knows are counted (fields.py), since most of them are numbers and notes of the author's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kubetune.data.column_names import ANSWERS, PROMPTS, TALKS
from kubetune.data.reading.fields import Fields, quoted, show
from kubetune.data.reading.messages import SWITCHES
from kubetune.data.record_values import RecordValue, is_number

# Answers to be preferred to others: TRL's and LLaMA-Factory's, LLaMA-Factory's new form, ms-swift's.
_PREFERENCES: Final = (
    "chosen",
    "rejected",
    "chosen_messages",
    "rejected_messages",
    "chosen_response",
    "rejected_response",
    "positive_messages",
    "negative_messages",
    "preferred_output",
    "non_preferred_output",
)
# Keys that say whether an answer is a good one.
VERDICTS: Final = ("label", "kto_tag")
# Verdicts in words.
_BAD: Final = ("false", "bad", "wrong", "incorrect", "rejected", "undesirable")
_TELLING: Final = frozenset((*_PREFERENCES, *VERDICTS))
_MEDIA: Final = ("video", "videos", "audio", "audios", "objects")
# Keys that decide whether a record is trained, and are no part of it.
DECIDING: Final = frozenset((*_TELLING, *SWITCHES))
_UNREADABLE: Final = frozenset((*_MEDIA, "chat_template_kwargs"))


def require_no_preference(value: RecordValue, columns: Mapping[str, str]) -> None:
    """Raise ValueError for a record with an answer that is a bad one, unless `columns` say which to train on."""
    if value.keys().isdisjoint(_TELLING):
        return
    if any(column in _PREFERENCES for column in columns.values()):
        return

    answers = []
    for key in _PREFERENCES:
        # A number is a score of something, and no answer.
        if value.get(key) and isinstance(value[key], (str, list, dict)):
            answers.append(key)

    if answers:
        raise ValueError(
            f"is preference data, by {quoted(answers)}, and `task: causal_lm` would train the bad answers like the good "
            f"ones; set `task: preference`{_advice(value, answers)}"
        )

    # A text with `label: 0` and no answer is to be classified.
    has_answer = any(value.get(answer) for answer in (*ANSWERS, *TALKS))
    for key in VERDICTS:
        if has_answer and _is_bad(value.get(key)):
            raise ValueError(
                f"is preference data: `{key}` is {show(value[key])}, so its answer is a bad one, and `task: causal_lm` "
                "would train the bad answers; set `task: preference` and `preference.loss: kto`, for which good ones have "
                "`true` and bad ones `false`, or leave them out"
            )


def _advice(value: RecordValue, answers: Sequence[str]) -> str:
    """Return how to train the good ones of these answers alone; empty where none is known to be good."""
    for answer in answers:
        if answer.startswith(("chosen", "positive")):
            prompt = next((key for key in (*PROMPTS, *TALKS) if value.get(key)), None)
            # Columns by which the same file trains its good answers alone.
            columns = _columns(prompt, answer)
            return f", or to train the good ones alone, give `columns: {{{columns}}}`"
    return ""


def _columns(prompt: str | None, chosen: str) -> str:
    """Return the value of `data.train.columns` with which the chosen answers are trained on."""
    if prompt is None:
        return f"messages: {chosen}"
    if prompt == "instruction":
        return f"output: {chosen}"
    if prompt == "prompt":
        return f"completion: {chosen}"
    return f"completion: {chosen}, prompt: {prompt}"


def _is_bad(verdict: Any) -> bool:
    """True for a verdict that an answer is a bad one; tables hold numbers as texts, and other numbers are scores."""
    if is_number(verdict):
        return float(verdict) in (0, -1)
    return str(verdict).strip().lower() in _BAD


def _is_zero(switch: Any) -> bool:
    if isinstance(switch, (int, float)):
        return switch == 0
    return switch in ("0", "0.0")


def require_trained(record: RecordValue) -> None:
    """Raise ValueError for a record that a switch beside its text forbids to train on; tables hold it as text."""
    for key, value in record.items():
        name = key.strip().lower()
        if name not in SWITCHES:
            continue
        switch = _lower(value)
        # A number beside `loss` is one that somebody measured.
        is_off = switch is False or switch == "false" or (name != "loss" and _is_zero(switch))
        if not is_off:
            continue
        advice = ""
        if record.keys().isdisjoint(_TELLING) and not record.keys().isdisjoint(TALKS):
            advice = ", or give it to the answers that are read and not trained"
        raise ValueError(
            f"has `{key}: {show(value)}`, so it is not to be trained, as a whole; leave such records out{advice}"
        )


def is_obeyed(key: str, value: Any) -> bool:
    """True if a key beside the text of a record says that it is trained, as it is."""
    switch = _lower(value)
    name = key.strip().lower()
    if name not in SWITCHES:
        return False
    # A number beside `loss` is a measured one, and says nothing about training.
    if name == "loss" and not isinstance(switch, bool | str):
        return False
    if isinstance(switch, bool | int | float):
        return switch == 1
    return switch in ("true", "1", "1.0")


def _lower(value: Any) -> Any:
    """Return a text without the space around it, in lower case; anything else as it is."""
    return value.strip().lower() if isinstance(value, str) else value


def require_readable(record: Fields) -> None:
    """Raise ValueError for a conversation that only makes sense with what kubetune cannot give to a model."""
    if record.keys().isdisjoint(_UNREADABLE):
        return
    for key in _MEDIA:
        if record.holds(key) and isinstance(record.peek(key), (str, list, dict)):
            raise ValueError(
                f"has `{key}`, which kubetune cannot show to a model; expected texts and images"
            )

    if record.holds("chat_template_kwargs"):
        settings = show(record.peek("chat_template_kwargs"))
        raise ValueError(
            f"chat_template_kwargs is {settings}, and kubetune renders all records with one set of settings; write a chat "
            "template that has them (`model.chat_template: file.jinja`), and leave the key out"
        )
