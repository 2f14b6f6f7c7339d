"""Contents of records that would make the rows another thing than their author meant, were it passed over.

Other keys that nothing here knows are counted (fields.py), since most of them are numbers and notes of the author's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kubetune.data.reading.fields import Fields, show
from kubetune.data.reading.messages import SWITCHES

_PREFERENCES: Final = (
    "chosen",
    "rejected",
    "chosen_messages",
    "rejected_messages",
    "chosen_response",
    "rejected_response",
    "positive_messages",
    "negative_messages",
)
"""Answers to be preferred to others: TRL's and LLaMA-Factory's, LLaMA-Factory's new form, ms-swift's."""

_PROMPTS: Final = ("instruction", "prompt", "messages", "conversations", "question", "input")
_VERDICTS: Final = ("label", "kto_tag")
_ANSWERED: Final = ("messages", "conversations", "completion", "output", "response")
_TELLING: Final = frozenset((*_PREFERENCES, *_VERDICTS))
_TALKS: Final = ("messages", "conversations")
_MEDIA: Final = ("video", "videos", "audio", "audios", "objects")
DECIDING: Final = frozenset((*_TELLING, *SWITCHES))
"""Keys that decide whether a record is trained, and are no part of it."""
_UNREADABLE: Final = frozenset((*_MEDIA, "chat_template_kwargs"))


def require_no_preference(value: Mapping[str, Any], columns: Mapping[str, str]) -> None:
    """Raise ValueError for a record with an answer that is a bad one, unless `columns` say which to train on."""
    if value.keys().isdisjoint(_TELLING) or any(
        found in _PREFERENCES for found in columns.values()
    ):
        return
    if found := [
        key for key in _PREFERENCES if isinstance(value.get(key), (str, list, dict)) and value[key]
    ]:
        chosen = next((key for key in found if key.startswith(("chosen", "positive"))), None)
        prompt = next((key for key in _PROMPTS if value.get(key)), None)
        advice = (
            f", or to train the good ones alone, give `columns: {{{_columns(prompt, chosen)}}}`"
            if chosen
            else ""
        )
        raise ValueError(
            f"is preference data, by {' and '.join(f'`{key}`' for key in found)}, and "
            f"`task: causal_lm` would train the bad answers like the good ones; set `task: preference`{advice}"
        )
    for key in _VERDICTS:
        if _is_false(value.get(key)) and any(value.get(answer) for answer in _ANSWERED):
            raise ValueError(
                f"is preference data: `{key}` is {show(value[key])}, so its answer is a bad one, and `task: causal_lm` "
                "would train the bad answers; set `task: preference` and `preference.loss: kto`, or leave them out"
            )


def _columns(prompt: str | None, chosen: str) -> str:
    """The value of `data.columns` with which the chosen answers are trained on."""
    if prompt is None:
        return f"messages: {chosen}"
    if prompt == "instruction":
        return f"output: {chosen}"
    return f"completion: {chosen}" + (f", prompt: {prompt}" if prompt != "prompt" else "")


def _is_false(verdict: Any) -> bool:
    return (
        verdict == 0
        if isinstance(verdict, (bool, int, float))
        else str(verdict).lower() in ("false", "0")
    )


def _is_zero(said: Any) -> bool:
    return (
        said == 0
        if isinstance(said, (int, float))
        else isinstance(said, str) and said in ("0", "0.0")
    )


def require_trained(record: Mapping[str, Any]) -> None:
    """Raise ValueError for a record that a switch beside its text forbids to train on; tables hold it as text."""
    for key, found in record.items():
        if (name := key.strip().lower()) not in SWITCHES:
            continue
        said = found.strip().lower() if isinstance(found, str) else found
        # A number beside `loss` is one that somebody measured.
        if said is False or said == "false" or (name != "loss" and _is_zero(said)):
            talk = record.keys().isdisjoint(_TELLING) and not record.keys().isdisjoint(_TALKS)
            answers = ", or give it to the answers that are read and not trained" if talk else ""
            raise ValueError(
                f"has `{key}: {show(found)}`, so it is not to be trained, as a whole; leave such records out{answers}"
            )


def is_obeyed(key: str, value: Any) -> bool:
    """True if a key beside the text of a record says that it is trained, as it is."""
    said = value.strip().lower() if isinstance(value, str) else value
    name = key.strip().lower()
    if name not in SWITCHES or (name == "loss" and not isinstance(said, bool | str)):
        return False
    return said in ("true", "1", "1.0") or (isinstance(said, bool | int | float) and said == 1)


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
        given = show(record.peek("chat_template_kwargs"))
        raise ValueError(
            f"chat_template_kwargs is {given}, and kubetune renders all records with one set of settings; write a chat "
            "template that has them (`model.chat_template: file.jinja`), and leave the key out"
        )
