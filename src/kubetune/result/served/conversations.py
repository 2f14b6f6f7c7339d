"""Compare the ids that a server makes of conversations with those of training, and name the likely cause of a difference.

A cause is not guessed: the same conversation is rendered with one thing changed, here or by the server, and what then
gives equal ids is the cause.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from kubetune.data.findings.kept_conversations import Conversation
from kubetune.data.reading.messages import REASONING
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.result.served.endpoint import Endpoint, NotAnswered
from kubetune.result.served.finding import Finding, Place

POINT: Final = "ids"
# Tokens before a difference that are shown.
_CONTEXT: Final = 8
# Differences that are shown.
_SHOWN: Final = 3
# Switches of chat templates whose defaults servers and models invert.
_SWITCHES: Final = ("enable_thinking", "thinking")

Message = dict[str, Any]


# Asked where a run kept no conversations of its data.
SAMPLES: Final = (
    Conversation(
        (
            {"role": "system", "content": "Answer in one word."},
            {"role": "user", "content": "Ping?"},
            {"role": "assistant", "content": "Pong."},
            {"role": "user", "content": "Again?"},
        )
    ),
    Conversation(({"role": "user", "content": "Ping?"},)),
)


def compare(
    endpoint: Endpoint, tokenizer: Tokenizer, conversations: Sequence[Conversation], origin: str
) -> Finding:
    """Return what the server's ids say. `origin`: of the conversations, in words."""
    if tokenizer.chat is None:
        return _of_texts(endpoint, tokenizer)
    places = []
    causes = []
    asked = 0
    for conversation in conversations:
        try:
            expected = tokenizer.encode_prompt(conversation.messages, conversation.tools)
        except ValueError:
            continue  # the template refuses it, such as one with a system text
        try:
            served = _served_ids(endpoint, conversation)
        except NotAnswered as error:
            return Finding(POINT, "unknown", f"the server cannot be asked: it {error}")
        asked += 1
        if served != expected:
            places.append(_first_difference(tokenizer, expected, served))
            causes.append(_cause(endpoint, tokenizer, conversation, expected, served))
    text = f"{asked} conversations {origin} have the ids of training"
    if not asked:
        return Finding(
            POINT, "unknown", f"the chat template takes none of the conversations {origin}"
        )
    if not places:
        return Finding(POINT, "right", text)
    reasons = "; ".join(dict.fromkeys(causes))
    text = f"{len(places)} of {asked} conversations {origin} have other ids than in training: {reasons}"
    return Finding(POINT, "wrong", text, places=tuple(places[:_SHOWN]))


def on_wire(conversation: Conversation) -> tuple[list[Message], list[Any]]:
    """Return messages and tools as the API of OpenAI takes them: arguments are JSON in a text, tools are in an object."""
    messages = []
    for message in conversation.messages:
        calls = []
        for call in message.get("tool_calls") or ():
            function = dict(call.get("function", call))
            if not isinstance(function.get("arguments"), str):
                function["arguments"] = json.dumps(
                    function.get("arguments") or {}, ensure_ascii=False
                )
            calls.append({"id": "call-0", "type": "function", **call, "function": function})
        sent = dict(message)
        if calls:
            sent["tool_calls"] = calls
        # vLLM's /tokenize knows thoughts by the one name alone, and its chat by both.
        for key in REASONING:
            if message.get(key):
                sent |= {"reasoning": message[key], "reasoning_content": message[key]}
        messages.append(sent)
    return messages, [_wrapped(tool) for tool in conversation.tools]


def _wrapped(tool: Any) -> Any:
    if isinstance(tool, dict) and "function" not in tool:
        return {"type": "function", "function": tool}
    return tool


def _served_ids(endpoint: Endpoint, conversation: Conversation, **settings: Any) -> list[int]:
    messages, tools = on_wire(conversation)
    return endpoint.conversation_ids(messages, tools, **settings)


def _of_texts(endpoint: Endpoint, tokenizer: Tokenizer) -> Finding:
    """Return what the ids of a plain text say, for a model without a chat template."""
    text = "Ping, pong: 1 + 2 = 3.\n"
    try:
        served = endpoint.text_ids(text)
    except NotAnswered as error:
        return Finding(POINT, "unknown", f"the server cannot be asked: it {error}")
    if served == tokenizer.encode_text(text, special=False):
        return Finding(
            POINT, "right", "a text has the ids of training; the model has no chat template"
        )
    return Finding(
        POINT, "wrong", "a text has other ids than in training: the server has another tokenizer"
    )


def _first_difference(tokenizer: Tokenizer, expected: list[int], served: list[int]) -> Place:
    """Return where two lists of ids differ first."""
    place = 0
    while place < min(len(expected), len(served)) and expected[place] == served[place]:
        place += 1

    def shown(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    return Place(
        shown(expected[max(0, place - _CONTEXT) : place]),
        shown(expected[place : place + _CONTEXT]),
        shown(served[place : place + _CONTEXT]),
    )


def _cause(
    endpoint: Endpoint,
    tokenizer: Tokenizer,
    conversation: Conversation,
    expected: list[int],
    served: list[int],
) -> str:
    """Return the cause of a difference."""
    bos = tokenizer.bos_id
    if bos is not None and served == [bos, *expected]:
        return "a second BOS: the server adds one to that of the chat template"
    if bos is not None and expected == [bos, *served]:
        return "no BOS: the server leaves it out"
    for switch in _SWITCHES:
        for value in (False, True):
            try:
                changed = _served_ids(endpoint, conversation, chat_template_kwargs={switch: value})
            except NotAnswered:
                continue
            if changed == expected:
                kwargs = json.dumps({switch: value})
                return (
                    f"{switch}: the server's default is the other one than in training; start it with "
                    f"--default-chat-template-kwargs '{kwargs}', or send chat_template_kwargs"
                )
    for cause, changed_conversation in _variants(conversation):
        try:
            ids = tokenizer.encode_prompt(changed_conversation.messages, changed_conversation.tools)
        except ValueError:
            continue
        if ids == served:
            return cause
    try:
        text = tokenizer.decode(expected, skip_special_tokens=False)
        if endpoint.text_ids(text) != tokenizer.encode_text(text, special=False):
            return "tokenizer: the server makes other ids of the same text"
    except NotAnswered:
        pass
    return (
        "template: the server has another chat template; start it with --chat-template and the export's "
        "chat_template.jinja"
    )


def _variants(conversation: Conversation) -> Iterator[tuple[str, Conversation]]:
    """Yield the conversation with one thing as a server may have it, and what that is."""
    messages = conversation.messages
    tools = conversation.tools
    without_thoughts = []
    for message in messages:
        without_thoughts.append({k: v for k, v in message.items() if k not in REASONING})
    yield (
        "thoughts dropped: the server leaves the reasoning of earlier turns out",
        Conversation(tuple(without_thoughts), tools),
    )
    # vLLM's types have `arguments` before `name`, which a template that writes a call as JSON shows.
    resorted = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            calls.append({**call, "function": dict(sorted(call["function"].items()))})
        resorted.append({**message, "tool_calls": calls} if calls else message)
    if any(message.get("tool_calls") for message in messages):
        cause = "key order of calls: the server writes a call's arguments before its name"
        yield cause, Conversation(tuple(resorted), tools)
    if tools:
        wrapped = tuple(map(_wrapped, tools))
        yield (
            "tools: the data have bare functions, and requests have them in an object with their type",
            Conversation(messages, wrapped),
        )
        for order in (
            tools[::-1],
            tuple(sorted(tools, key=_name)),
            tuple(sorted(tools, key=_name))[::-1],
        ):
            yield (
                "tool order: the server writes the tools in another order",
                Conversation(messages, order),
            )
        yield "tools dropped: the server leaves them out", Conversation(messages)
    others = tuple(message for message in messages if message.get("role") != "system")
    yield "system text: the server leaves it out", Conversation(others, tools)


def _name(tool: Any) -> str:
    return str(_wrapped(tool).get("function", {}).get("name"))
