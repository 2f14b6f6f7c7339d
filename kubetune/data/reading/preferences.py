"""Answers to be compared, or judged, in every spelling: each as a record of its own with `prompt` and `completion`.

Those records are then read as any others are (formats.py), which knows messages, tools and images; nothing here does.
The spellings are TRL's, LLaMA-Factory's, ms-swift's and axolotl's, and Anthropic's texts of "\n\nHuman: …".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from kubetune.config.schema import RecordKind
from kubetune.data.reading.fields import keys, listed, show
from kubetune.data.reading.messages import SPEAKERS

_CHOSEN: Final = ("chosen", "chosen_response", "chosen_messages")
_REJECTED: Final = ("rejected", "rejected_response", "rejected_messages")
_TALKS: Final = ("messages", "conversations", "conversation")
_QUESTIONS: Final = ("prompt", "question", "query", "instruction", "input")
_ANSWERS: Final = ("completion", "output", "response", "answer")
_VERDICTS: Final = ("label", "kto_tag")
_OF_CHATS: Final = ("system", "system_prompt", "tools", "functions", "images", "image", "history")
"""Keys that say that a prompt goes through the chat template, plain text though it is."""
_OF_REJECTED: Final = ("images", "image", "videos", "audios", "tools", "objects")
"""Keys that ms-swift may have a second time for the rejected answer, as `rejected_images`."""

_SPOKEN: Final = re.compile(r"(?:^|\n\n)(Human|Assistant):")


class Unusable(ValueError):
    """A pair without a difference to train on."""


class Side(NamedTuple):
    """One answer with its prompt, as a record of the shape prompt_completion, and what it is called in the file."""

    record: dict[str, Any]
    name: str


def likely_kind(value: Mapping[str, Any]) -> RecordKind:
    """The kind of a record whose task is not known: with answers to compare, one that is judged, or a text."""
    if any(value.get(key) for key in (*_CHOSEN, *_REJECTED)) or isinstance(
        value.get("output"), list
    ):
        return "pair"
    return "judged" if any(isinstance(value.get(key), bool) for key in _VERDICTS) else "text"


def sides_of(value: Mapping[str, Any], shape: str) -> tuple[Side, Side]:
    """The chosen answer and the rejected one. Raises ValueError for a record that can be read in more than one way."""
    rest = dict(value)
    _require_one_context(rest)
    chosen, rejected = _take(rest, _CHOSEN), _take(rest, _REJECTED)
    if (
        chosen is None
        and rejected is None
        and isinstance(ranked := rest.get("output"), list)
        and len(ranked) == 2
    ):
        chosen, rejected = ("output[0]", ranked[0]), ("output[1]", ranked[1])
        del rest["output"]
    elif chosen is None and not any(rest.get(key) for key in _TALKS):
        chosen = _take(rest, _ANSWERS)
    if chosen is None and rejected is None and isinstance(ranked := rest.get("answers"), list):
        raise ValueError(
            f"has {len(ranked)} `answers` to one prompt; expected two, `chosen` and `rejected`: make a record of the "
            "best with one that is worse, or several such"
        )
    if rejected is None or (chosen is None and not any(rest.get(key) for key in _TALKS)):
        raise ValueError(
            f"{keys(value)}; expected two answers, `chosen` and `rejected`, with their prompt"
        )
    names = ("messages" if chosen is None else chosen[0], rejected[0])
    prompt, answers = _compared(rest, chosen and chosen[1], rejected[1])
    return tuple(  # type: ignore[return-value]  # two
        Side(_record(rest, prompt, answer, shape), name)
        for answer, name in zip(answers, names, strict=True)
    )


def judged_side_of(value: Mapping[str, Any], shape: str) -> tuple[Side, bool]:
    """The answer of a record, and whether it is a good one. Raises ValueError as `sides_of` does."""
    rest = dict(value)
    is_good = _verdict(rest)
    if any(rest.get(key) for key in (*_CHOSEN, *_REJECTED)):
        raise ValueError(
            "has two answers, and `preference.loss: kto` takes one at a time; `kubetune data convert --to judged` "
            "makes two records of each"
        )
    talk = _taken_talk(rest)
    if talk is not None:
        prompt, answer = _last_answer(talk)
        _require_told(rest, talk)
        name = "messages"
    else:
        found = _take(rest, _ANSWERS)
        if found is None:
            raise ValueError(f"{keys(value)}; expected `completion` or `messages`, with `label`")
        name, answer = found
        if _is_conversation(answer):
            prompt, answer = _last_answer(answer)
            _require_told(rest, prompt)
        else:
            prompt = _question(rest)
    return Side(_record(rest, prompt, answer, shape), name), is_good


def _compared(rest: dict[str, Any], chosen: Any, rejected: Any) -> tuple[Any, tuple[Any, Any]]:
    """The prompt of both answers, and the two: texts or messages. Takes them out of `rest`."""
    if chosen is None:
        whole = _taken_talk(rest) or []
        if _is_conversation(rejected):
            return _shared(whole, rejected)
        prompt, answer = _last_answer(whole)
        return prompt, (answer, rejected)
    if _is_conversation(chosen) or _is_conversation(rejected):
        if not (_is_conversation(chosen) and _is_conversation(rejected)):
            raise ValueError(
                "has one answer with its prompt and one without; expected both as whole conversations"
            )
        prompt, answers = _shared(chosen, rejected)
        _require_told(rest, [*prompt, *answers[0]])
        return prompt, answers
    talk = _taken_talk(rest)
    if talk is not None:
        _require_told(rest, talk)
        return talk, (chosen, rejected)
    if any(rest.get(key) is not None for key in _QUESTIONS):
        told = isinstance(rest.get("prompt"), str)
        prompt = _question(rest)
        if told and isinstance(
            prompt, list
        ):  # as HH-RLHF's, whose answers begin with the space behind the colon
            chosen, rejected = (a.strip() if isinstance(a, str) else a for a in (chosen, rejected))
        return prompt, (chosen, rejected)
    if not isinstance(chosen, str) or not isinstance(rejected, str):
        raise ValueError(
            f"has no prompt: {keys(rest)} beside the answers; expected `prompt` or `messages`"
        )
    spoken = _dialogue(chosen), _dialogue(rejected)
    if spoken[0] and spoken[1]:
        return _shared(*spoken)
    return _shared_text(chosen, rejected)


def _record(rest: dict[str, Any], prompt: Any, answer: Any, shape: str) -> dict[str, Any]:
    if over := next(
        (key for key in ("prompt", "completion") if rest.get(key) not in (None, "", [], {})), None
    ):
        raise ValueError(
            f"has `{over}` beside its answers and what they go on from; expected these alone"
        )
    if isinstance(prompt, str) and isinstance(answer, str):
        is_plain = shape == "prompt_completion" or (
            shape == "auto" and not any(key in rest for key in _OF_CHATS)
        )
        if is_plain:
            return {**rest, "prompt": prompt, "completion": answer}
    rest = dict(rest)  # that of the other answer too
    before = _asked(rest, prompt) if isinstance(prompt, str) else prompt
    return {**rest, "prompt": before, "completion": answer}


def _take(rest: dict[str, Any], names: Sequence[str]) -> tuple[str, Any] | None:
    """The one key of these that holds something, with its value, taken out. Raises ValueError where several do."""
    found = [name for name in names if rest.get(name) not in (None, [], {})]
    if len(found) > 1:
        raise ValueError(
            f"has {' and '.join(f'`{name}`' for name in found)}; expected one of them, or `data.columns` that say which"
        )
    for name in names:
        if name not in found:
            rest.pop(name, None)
    return (found[0], rest.pop(found[0])) if found else None


def _taken_talk(rest: dict[str, Any]) -> list[Any] | None:
    found = _take(rest, _TALKS)
    return None if found is None else _turns(listed({found[0]: found[1]}, found[0]))


def _turns(talk: list[Any]) -> list[Any]:
    """Messages of a conversation; ms-swift has those of the user and of the assistant in one, by their names."""
    found = []
    for turn in talk:
        said = (
            {SPEAKERS.get(key): text for key, text in turn.items()}
            if isinstance(turn, dict)
            else {}
        )
        if said.keys() != {"user", "assistant"} or len(turn) != 2:
            return talk
        found += [{"role": role, "content": said[role]} for role in ("user", "assistant")]
    return found


def _question(rest: dict[str, Any]) -> Any:
    """The prompt, in messages or as text, taken out. Alpaca's has two parts."""
    asked = {key: rest.pop(key) for key in _QUESTIONS if rest.get(key) not in (None, [])}
    if asked.keys() == {"instruction", "input"} and all(
        isinstance(text, str) for text in asked.values()
    ):
        return _asked(
            rest, "\n".join(text for text in (asked["instruction"], asked["input"]) if text)
        )
    if len(asked) != 1:
        found = " and ".join(f"`{key}`" for key in asked)
        raise ValueError(
            f"has {found or 'no prompt'}; expected one prompt, or `data.columns` that say which it is"
        )
    key, prompt = asked.popitem()
    if isinstance(prompt, str):
        # A question is always somebody's; a prompt may be any text.
        return _dialogue(prompt, opens=True) or (
            prompt if key == "prompt" else _asked(rest, prompt)
        )
    if not isinstance(prompt, list):
        raise ValueError(f"{key} is {show(prompt)}; expected a text or messages")
    return prompt


def _asked(rest: dict[str, Any], question: str) -> list[dict[str, Any]]:
    """A question as messages, behind those of `history`, which is taken out."""
    history = rest.pop("history", None) or []
    if not isinstance(history, list) or any(
        not isinstance(pair, list) or len(pair) != 2 for pair in history
    ):
        raise ValueError(f"history is {show(history)}; expected a list of [question, answer]")
    roles = ("user", "assistant")
    before = [
        {"role": role, "content": text}
        for pair in history
        for role, text in zip(roles, pair, strict=True)
    ]
    return [*before, {"role": "user", "content": question}]


def _speaker(message: Any) -> str | None:
    said = message.get("role", message.get("from")) if isinstance(message, dict) else None
    return SPEAKERS.get(said) if isinstance(said, str) else None


def _is_conversation(answer: Any) -> bool:
    """The case of an answer that begins with its prompt."""
    return isinstance(answer, list) and bool(answer) and _speaker(answer[0]) in ("user", "system")


def _last_answer(talk: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """A conversation up to the last message of the user, and what follows."""
    asked = [i for i, message in enumerate(talk) if _speaker(message) == "user"]
    end = asked[-1] + 1 if asked else sum(_speaker(message) == "system" for message in talk[:1])
    if not talk[end:]:
        raise ValueError("ends with a message of the user; expected the answer to it")
    return list(talk[:end]), list(talk[end:])


def _shared(
    chosen: Sequence[Any], rejected: Sequence[Any]
) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
    """The beginning that two conversations share, and the rest of each. Raises ValueError where no answer does."""
    pairs = list(zip(chosen, rejected, strict=False))
    same = next(
        (i for i, (one, other) in enumerate(pairs) if _said(one) != _said(other)), len(pairs)
    )
    if same == len(chosen) == len(rejected):
        raise Unusable("has the same answer as chosen and as rejected; expected two that differ")
    for name, talk in (("chosen", chosen), ("rejected", rejected)):
        if same == len(talk):
            raise Unusable(f"has no {name} answer: that conversation ends where the other goes on")
        if _speaker(talk[same]) not in ("assistant", None):
            raise Unusable(
                f"has prompts that differ: message {same + 1} of {name} is the {_speaker(talk[same])}'s; expected two "
                "conversations that differ from an answer of the assistant on"
            )
    return list(chosen[:same]), (list(chosen[same:]), list(rejected[same:]))


def _said(message: Any) -> Any:
    return (
        {key: said for key, said in message.items() if said is not None}
        if isinstance(message, dict)
        else message
    )


def _shared_text(chosen: str, rejected: str) -> tuple[str, tuple[str, str]]:
    """The beginning that two texts share, up to the end of a word, and the rest of each."""
    same = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    if same is None:
        what = (
            "the same answer as chosen and as rejected"
            if chosen == rejected
            else "an answer that the other begins with"
        )
        raise Unusable(f"has {what}; expected two that differ, and a `prompt`")
    same = len(
        re.sub(r"\s*\S*$", "", chosen[:same])
    )  # no word, and no space before one, is cut in two
    if not same:
        raise ValueError("has no `prompt`, and its answers share no beginning that could be it")
    return chosen[:same], (chosen[same:], rejected[same:])


def _dialogue(text: str, *, opens: bool = False) -> list[dict[str, str]]:
    """Messages of a text such as HH-RLHF's; none where it is another. `opens`: the answer to it is to follow."""
    parts = _SPOKEN.split(text)
    if len(parts) < 5 or parts[0].strip() or parts[1] != "Human":
        return []
    turns = [
        {"role": {"Human": "user", "Assistant": "assistant"}[who], "content": said.strip()}
        for who, said in zip(parts[1::2], parts[2::2], strict=True)
    ]
    if not opens:
        return turns
    return turns[:-1] if turns[-1] == {"role": "assistant", "content": ""} else []


def _require_told(rest: dict[str, Any], talk: Sequence[Any]) -> None:
    """Take prompts out that a conversation holds too, as UltraFeedback has them. Raises ValueError for another."""
    contents = [
        message.get("content", message.get("value"))
        for message in talk
        if isinstance(message, dict)
    ]
    for key in (*_TALKS, *_QUESTIONS):
        given = rest.get(key)
        if given in (None, "", []):
            continue
        is_known = given in contents
        if isinstance(given, list):
            is_known = [_said(message) for message in given] == [
                _said(message) for message in talk[: len(given)]
            ]
        if not is_known:
            raise ValueError(f"has `{key}` that its conversations do not hold; expected one prompt")
        del rest[key]


def _require_one_context(rest: dict[str, Any]) -> None:
    """Take out what ms-swift has a second time. Raises ValueError where it is another than the first."""
    for key in _OF_REJECTED:
        given = rest.pop(f"rejected_{key}", None)
        if given not in (None, [], "") and given != rest.get(key):
            raise ValueError(
                f"has `rejected_{key}` other than `{key}`; expected two answers to the same prompt"
            )


def _verdict(rest: dict[str, Any]) -> bool:
    """The verdict on an answer, true for a good one, taken out. Raises ValueError for none, and for two that differ."""
    said = {}
    for key in _VERDICTS:
        given = rest.pop(key, None)
        if given is None:
            continue
        text = str(given).lower()
        if isinstance(given, float) or text not in ("true", "false", "1", "0"):
            raise ValueError(
                f"{key} is {show(given)}; expected true for a good answer, false for a bad one"
            )
        said[key] = text in ("true", "1")
    if len(set(said.values())) != 1:
        raise ValueError(
            "has `label` and `kto_tag`, which say different things"
            if said
            else f"{keys(rest)}; expected a `label`, true for a good answer and false for a bad one"
        )
    return next(iter(said.values()))
