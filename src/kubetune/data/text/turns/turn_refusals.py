"""Explain a chat template's refusal to the user: find the part of a conversation that the template does not take.

A template is somebody else's program, whose own errors ("'NoneType' object is not iterable") name no part of a record.
So the conversation is tried without each of its parts, until the template writes the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import jinja2

from kubetune.data.column_names import REASONING
from kubetune.data.text.turns.marks import Message

# Writes messages and tools, with further variables of a template. They raise Refusal.
Write = Callable[..., object]

_PLAIN: Final[list[Message]] = [
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": "!"},
]
_FACTS: Final = {
    "name": "f",
    "description": "?",
    "parameters": {"type": "object", "properties": {}},
}
# A tool in the forms of OpenAI and Cohere at once.
_TOOL: Final = {
    "type": "function",
    "function": _FACTS,
    **_FACTS,
    "parameter_definitions": {},
}
# What templates for retrieval take.
_DOCUMENTS: Final = [{"title": "?", "text": "?"}]
_OTHER: Final = "choose another (`model.chat_template: file.jinja`)"


class Refusal(ValueError):
    """The error of a template that does not write a conversation. `reason`: in the template's own words."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} chat template refused the conversation: {reason}")
        self.name = name
        self.reason = reason


class _Attempt(NamedTuple):
    """A conversation with something left out."""

    what: str  # what is left out, in words
    messages: list[Message]
    tools: Sequence[Any] | None


def words_of(error: Exception, template: jinja2.Template) -> str:
    """Return the message that a template raised itself, or the error and the line in which it failed."""
    if type(error) is jinja2.TemplateError:  # raise_exception
        return f"it says {str(error)!r}"

    line = ""
    frame = error.__traceback__
    # Jinja compiles a template to Python; its frames say where they are in the template.
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == "<template>":
            line = f" in its line {template.get_corresponding_lineno(frame.tb_lineno)}"
        frame = frame.tb_next

    return f"it fails{line}: {error}"


def require_order(
    name: str,
    source: str,
    messages: Sequence[Message],
) -> None:
    """Raise ValueError if tool results are in another order than their calls, unless the template writes their ids."""
    if "tool_call_id" in source:
        return
    # Calls 1 2 with the results 2 1: without ids the model would take each result for the other call's.
    numbers: dict[Any, int] = {}  # id of a call -> its number; ids may come again
    calls = 0
    last = -1
    for i, message in enumerate(messages):
        for call in message.get("tool_calls") or ():
            calls += 1
            numbers[call.get("id")] = calls
        if message["role"] != "tool" or message.get("tool_call_id") is None:
            continue
        number = numbers.get(message["tool_call_id"])
        if number is None:
            continue
        if number < last:
            raise ValueError(
                f"results of tools stand in another order than their calls (messages[{i}]), and {name} chat "
                "template does not write which call each one answers; put them in the order of the calls"
            )
        last = number


def explained(
    refusal: Refusal,
    write: Write,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
) -> ValueError:
    """Return the error for a conversation that a template refused; it names the part that the template does not take."""

    def is_written(*conversation: Any, **variables: Any) -> bool:
        try:
            write(*conversation, **variables)
        except ValueError:
            return False

        return True

    name = f"{refusal.name} chat template"

    # A template that does not even write a question and an answer needs something more in every conversation.
    if not is_written(_PLAIN, None):
        needed = ""
        if is_written(_PLAIN, [_TOOL]):
            needed = "tools"
        elif is_written(_PLAIN, None, documents=_DOCUMENTS):
            needed = "documents to answer from"
        if not needed:
            problem = "does not even write a question with its answer"
        elif tools:
            problem = f"does not take {needed} of this form"
        else:
            problem = f"takes only conversations with {needed}"

        return ValueError(f"{name} {problem} ({refusal.reason}); {_OTHER}")

    for attempt in _attempts(list(messages), tools):
        if is_written(attempt.messages, attempt.tools):
            return ValueError(
                f"{name} does not take {attempt.what} ({refusal.reason}); choose one that does "
                "(`model.chat_template: file.jinja`), or take that out of the data"
            )

    return ValueError(
        f"{name} does not take this conversation ({refusal.reason}), whatever part of it is left out; {_OTHER}, or "
        "take the record out of the data"
    )


def _attempts(messages: list[Message], tools: Sequence[Any] | None) -> list[_Attempt]:
    """Return the conversation without each part that a template may not take, then without all of those parts."""
    attempts: list[_Attempt] = []
    if tools:
        attempts.append(_Attempt("the tools", messages, None))

    bare = messages  # without all parts
    for what, leave_out in _PARTS:
        # A part that the conversation does not have need not be tried.
        fewer = leave_out(messages)
        if fewer != messages:
            where = f"{what} (messages[{_first_difference(messages, fewer)}])"
            attempts.append(_Attempt(where, fewer, tools))
        bare = leave_out(bare)

    if len(attempts) > 1:
        everything = " together with ".join(attempt.what for attempt in attempts)
        attempts.append(_Attempt(everything, bare, None))
    return attempts


def _first_difference(messages: list[Message], fewer: list[Message]) -> int:
    for i, (message, other) in enumerate(zip(messages, fewer, strict=False)):
        if message != other:
            return i
    return len(fewer)


def _without_system(messages: list[Message]) -> list[Message]:
    return [message for message in messages if message["role"] not in ("system", "developer")]


def _without_calls(messages: list[Message]) -> list[Message]:
    return [m for m in messages if m["role"] != "tool" and not m.get("tool_calls")]


def _without_reasoning(messages: list[Message]) -> list[Message]:
    bare: list[Message] = []
    for message in messages:
        bare.append({key: value for key, value in message.items() if key not in REASONING})
    return bare


def _one_of_each_row(messages: list[Message]) -> list[Message]:
    """Return the first of all messages in a row by the same role."""
    first = messages[:1]
    for before, after in pairwise(messages):
        if after["role"] != before["role"]:
            first.append(after)
    return first


def _from_question(messages: list[Message]) -> list[Message]:
    """Return the messages without the answers before the first question."""
    # Some templates want a question first. Messages of the system may be before it.
    kept = []
    asked = False
    for message in messages:
        asked = asked or message["role"] == "user"
        if asked or message["role"] != "assistant":
            kept.append(message)
    return kept


# (part that a template may not take, function that leaves it out)
_PARTS: Final[list[tuple[str, Callable[[list[Message]], list[Message]]]]] = [
    ("messages by the system", _without_system),
    ("tool calls and results", _without_calls),
    ("reasoning", _without_reasoning),
    ("messages in a row by the same role", _one_of_each_row),
    ("answers that no question precedes", _from_question),
]
