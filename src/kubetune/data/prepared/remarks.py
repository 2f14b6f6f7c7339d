"""Notes about an example and its row: texts that somebody wrote, flaws of conversations, counts of answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from kubetune.data.column_names import REASONING
from kubetune.data.reading.examples import (
    Chat,
    Example,
    Judged,
    Labelled,
    Pair,
    Preference,
    Text,
    parts_of,
)
from kubetune.data.reading.messages import IMAGE_TAG
from kubetune.data.reading.strict_json import JsonObject
from kubetune.data.record_values import is_word_for_none
from kubetune.data.text.encode import Encoded
from kubetune.data.text.row_notes import RowNote


def answers_of(example: Example, encoded: Encoded) -> dict[str, int]:
    """Return counts of a row's answers and of their labels, for rows that have compared or judged answers."""
    if isinstance(example, Judged):
        return {"good" if example.is_good else "bad": 1}
    if not encoded.split:
        return {}
    chosen, rejected = (sum(trained) for _, trained in encoded.sequences)
    return {
        "chosen_tokens": chosen,
        "rejected_tokens": rejected,
        "chosen_longer": int(chosen > rejected),
    }


def has_plain_prompt(example: Example) -> bool:
    """True if the record has a prompt that is not a conversation."""
    return isinstance(parts_of(example)[0], Pair)


def flaws_of(example: Example, template: str) -> list[RowNote]:
    """Return what conversations hold that their author hardly meant."""
    flaws: list[RowNote] = []
    if any(is_word_for_none(_learned(part)) for part in parts_of(example)):
        flaws.append("answers_missing")
    if isinstance(example, Preference) and example.is_scored_otherwise:
        flaws.append("scored_otherwise")
    for chat in parts_of(example):
        if not isinstance(chat, Chat):
            continue
        pairs = pairwise(message["role"] for message in chat.messages)
        if ("assistant", "assistant") in pairs:
            flaws.append("answers_in_a_row")
        if any(_thinks_twice(message) for message in chat.messages):
            flaws.append("thoughts_twice")
        if any(_is_wrapped(message, template) for message in chat.messages):
            flaws.append("results_wrapped")
        if _calls_what_is_not_offered(chat):
            flaws.append("calls_not_offered")
    # Both answers of a pair may have the same.
    return list(dict.fromkeys(flaws))


def _learned(part: Example) -> str:
    """Return the last answer of a part of an example, or its whole text; empty if it has none."""
    match part:
        case Chat():
            last = part.messages[-1]
            return str(last["content"]) if last["role"] == "assistant" else ""
        case Pair():
            return part.completion
        case Text():
            return part.text
        case _:
            return ""


def _thinks_twice(message: JsonObject) -> bool:
    """True if an answer has thoughts in a field, and its content begins with thoughts between tags."""
    has_thoughts = any(message.get(key) for key in REASONING)
    return has_thoughts and message["content"].lstrip().startswith(("<think>", "<thinking>"))


def _is_wrapped(message: JsonObject, template: str) -> bool:
    """True if the result of a tool begins with a tag that the template writes itself."""
    if message["role"] != "tool":
        return False
    tag = re.match(r"\s*(<[^<>\s]{1,40}>)", message["content"])
    return tag is not None and tag[1] in template


def _calls_what_is_not_offered(chat: Chat) -> bool:
    """True if a trained answer calls a function that is not among the tools of its conversation, which has some."""
    offered = {_name_of(tool) for tool in chat.tools}
    for index, message in enumerate(chat.messages):
        is_trained = index >= chat.context and index not in chat.not_trained
        for call in message.get("tool_calls") or () if is_trained else ():
            if offered and _name_of(call) not in offered:
                return True
    return False


def _name_of(tool: Any) -> Any:
    """Return the name of a tool or of a call; None for one in another form."""
    function = tool.get("function") if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def written_texts(example: Example) -> Iterator[str]:
    """Yield the texts that somebody wrote into a record: contents, reasoning, tools and calls, or its plain texts."""
    for part in parts_of(example):
        match part:
            case Chat():
                for message in part.messages:
                    yield from _texts_of_message(message, has_images=bool(part.images))
                if part.tools:
                    yield from _leaves(part.tools)
            case Pair():
                yield from (part.prompt, part.completion)
            case Text():
                yield part.text
            case Labelled(text, second):
                yield text
                if second is not None:
                    yield second


def _texts_of_message(message: JsonObject, *, has_images: bool) -> Iterator[str]:
    content = message["content"]
    if has_images:
        content = content.replace(IMAGE_TAG, "")  # tags stand for images, they are no text
    yield content
    for key in REASONING:
        reasoning = message.get(key)
        if isinstance(reasoning, str):
            yield reasoning
    calls = message.get("tool_calls")
    if calls:
        yield from _leaves(calls)


def _leaves(value: Any) -> Iterator[str]:
    """Yield all texts within a value, keys too."""
    match value:
        case str():
            yield value
        case dict():
            for key, item in value.items():
                yield str(key)
                yield from _leaves(item)
        case list() | tuple():
            for item in value:
                yield from _leaves(item)


def keys_of_messages(template: str) -> frozenset[str]:
    """Return the keys of messages that a chat template reads, such as `message.name` or `messages[0]['name']`."""
    # Names of a message: `m` in `for m in messages`, `message`, and `messages[…]`.
    loop_variables = re.findall(r"\bfor\s+(\w+)\s+in\s+[^%]*messages", template)
    message = "|".join({"message", r"messages\s*\[[^\]]+\]", *map(re.escape, loop_variables)})
    # A key after it: `.key`, `.get('key'` or `['key'`.
    access = r"(?:\.(?!get\()|\.get\(\s*['\"]|\[\s*['\"])"
    return frozenset(re.findall(rf"\b(?:{message})\s*{access}\s*(\w+)", template))
