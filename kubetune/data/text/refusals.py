"""Refusals of chat templates in the user's words: the part of a conversation that one does not take.

A template is a program of somebody else's, whose own words ("'NoneType' object is not iterable") name no part of a
record. The part is found by leaving it out: without it the conversation is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import jinja2

from kubetune.data.text.marks import REASONING_FIELDS, Message

Conversation = tuple[list[Message], Sequence[Any] | None]
Write = Callable[..., object]
"""Writes messages and tools, and more variables of a template. Raises Refusal."""

_PLAIN: Final[list[Message]] = [
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": "!"},
]
_FACTS: Final = {
    "name": "f",
    "description": "?",
    "parameters": {"type": "object", "properties": {}},
}
_TOOL: Final = {"type": "function", "function": _FACTS, **_FACTS, "parameter_definitions": {}}
"""A tool in the forms of OpenAI and Cohere at once."""
_NEEDED: Final[dict[str, tuple[Any, dict[str, Any]]]] = {
    "tools": ([_TOOL], {}),
    "documents to answer from": (None, {"documents": [{"title": "?", "text": "?"}]}),
}


class Refusal(ValueError):
    """A conversation that a template did not write; `said` is why, by the template itself."""

    def __init__(self, name: str, said: str) -> None:
        super().__init__(f"{name} chat template refused the conversation: {said}")
        self.name, self.said = name, said


def words_of(error: Exception, template: jinja2.Template) -> str:
    """An error of a template: what it raised by itself, or the line that it tripped over."""
    if type(error) is jinja2.TemplateError:  # raise_exception
        return f"it says {str(error)!r}"
    at, line = error.__traceback__, None
    while at is not None:
        if at.tb_frame.f_code.co_filename == "<template>":
            line = template.get_corresponding_lineno(at.tb_lineno)
        at = at.tb_next
    return f"it fails{f' in its line {line}' if line else ''}: {error}"


def require_order(name: str, source: str, messages: Sequence[Message]) -> None:
    """Raise ValueError for results of tools in another order than their calls, whose ids a template does not write."""
    if "tool_call_id" in source:
        return
    places: dict[Any, int] = {}
    number, last = 0, -1
    for i, message in enumerate(messages):
        for call in message.get("tool_calls") or ():
            places[call.get("id")] = number = number + 1
        answered = message.get("tool_call_id") if message["role"] == "tool" else None
        if answered is not None and (place := places.get(answered)) is not None:
            if place < last:
                raise ValueError(
                    f"results of tools stand in another order than their calls (messages[{i}]), and {name} chat "
                    "template does not write which call each answers; put them in the order of the calls"
                )
            last = place


def explained(
    refusal: Refusal, write: Write, messages: Sequence[Message], tools: Sequence[Any] | None
) -> ValueError:
    """The error for a conversation that a template refused, naming the part that it does not take."""

    def is_written(*conversation: Any, **variables: Any) -> bool:
        try:
            write(*conversation, **variables)
        except ValueError:
            return False
        return True

    name, said = f"{refusal.name} chat template", refusal.said
    if not is_written(_PLAIN, None):
        needs = next(
            (what for what, (more, given) in _NEEDED.items() if is_written(_PLAIN, more, **given)),
            None,
        )
        found = "does not even write a question with its answer"
        if needs:
            found = (
                f"does not take {needs} of this form"
                if tools
                else f"takes only conversations with {needs}"
            )
        return ValueError(
            f"{name} {found} ({said}); choose another (`model.chat_template: file.jinja`)"
        )
    for what, *rest in _less(list(messages), tools):
        if is_written(*rest):
            return ValueError(
                f"{name} does not take {what} ({said}); choose one that does (`model.chat_template: file.jinja`), or "
                "take that out of the data"
            )
    return ValueError(
        f"{name} does not take this conversation ({said}), and nothing that could be left out of it helps; choose "
        "another (`model.chat_template: file.jinja`), or take the record out of the data"
    )


def _less(
    messages: list[Message], tools: Sequence[Any] | None
) -> Iterator[tuple[str, list[Message], Any]]:
    """A conversation without one of its parts, or several, each with the words for what is missing."""
    names: list[str] = []
    steps: list[tuple[str, Callable[[list[Message]], list[Message]]]] = [
        ("messages by the system", _without_system),
        ("tool calls and results", _without_calls),
        ("reasoning", _without_reasoning),
        ("messages in a row by the same role", _merged),
        ("answers that no question precedes", _from_question),
    ]
    if tools:
        yield "the tools", messages, None
        names.append("the tools")
    for what, change in steps:
        if (changed := change(messages)) != messages:
            first = next(
                (
                    i
                    for i, pair in enumerate(zip(messages, changed, strict=False))
                    if pair[0] != pair[1]
                ),
                len(changed),
            )
            where = f"{what} (messages[{first}])"
            yield where, changed, tools
            names.append(where)
    if names[1:]:
        for _, change in steps:
            messages = change(messages)
        yield " together with ".join(names), messages, None


def _without_system(messages: list[Message]) -> list[Message]:
    return [message for message in messages if message["role"] not in ("system", "developer")]


def _without_calls(messages: list[Message]) -> list[Message]:
    return [
        message
        for message in messages
        if message["role"] != "tool" and not message.get("tool_calls")
    ]


def _without_reasoning(messages: list[Message]) -> list[Message]:
    return [
        {key: value for key, value in m.items() if key not in REASONING_FIELDS} for m in messages
    ]


def _merged(messages: list[Message]) -> list[Message]:
    """The first message of each row of messages by one role."""
    return messages[:1] + [
        after for before, after in pairwise(messages) if after["role"] != before["role"]
    ]


def _from_question(messages: list[Message]) -> list[Message]:
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), len(messages))
    head = [m for m in messages[:first] if m["role"] != "assistant"]
    return head + messages[first:]
