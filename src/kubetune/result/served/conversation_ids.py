"""Compare the ids that a server makes of conversations with those of training, and name the likely cause of a difference.

A cause is not guessed: the same conversation is rendered with one thing changed, here or by the server, and what then
gives equal ids is the cause.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import dropwhile, islice, permutations
from typing import Any, Final

from kubetune.data.column_names import REASONING
from kubetune.data.findings.kept_conversations import Conversation
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.result.served.endpoint import Endpoint, NotAnswered
from kubetune.result.served.known_model import KnownModel
from kubetune.result.served.points import IdsDifference, ServedPoint

# Tokens of a difference that are shown.
_SHOWN_TOKENS: Final = 8
# Switches of chat templates whose defaults servers and models invert, after none of them.
_SWITCHES: Final[Sequence[dict[str, bool]]] = (
    {},
    {"enable_thinking": False},
    {"enable_thinking": True},
    {"thinking": False},
    {"thinking": True},
)
# Orders of tools that are tried: all of five.
_ORDERS: Final = 120

# Asked where a run kept no conversations of its data.
_SAMPLE: Final = (
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "Ping?"},
    {"role": "assistant", "content": "Pong."},
    {"role": "user", "content": "Again?"},
)
# Some templates refuse system texts.
_SAMPLES: Final = (Conversation(_SAMPLE), Conversation(_SAMPLE[1:]))
# Asked of a model without a chat template.
_TEXT: Final = "Ping, pong: 1 + 2 = 3.\n"


def compare(endpoint: Endpoint, known: KnownModel) -> ServedPoint:
    """Return what the server's ids say. Raise NotAnswered if it tells no ids."""
    tokenizer = known.tokenizer
    if tokenizer.chat is None:
        if endpoint.text_ids(_TEXT) != tokenizer.encode_text(_TEXT, special=False):
            text = "a text has other ids than in training: the server has another tokenizer"
            return ServedPoint("wrong", text)
        return ServedPoint("right", "a text has the ids of training; there is no chat template")
    origin = f"{len(known.conversations)} conversations of the data"
    if not known.conversations:
        origin = "conversations of kubetune itself, as none of the data are kept,"
    differences: dict[str, IdsDifference] = {}  # cause -> the first one
    differing = 0
    asked = 0
    for conversation in known.conversations or _SAMPLES:
        try:
            expected = tokenizer.encode_prompt(conversation.messages, conversation.tools)
        except ValueError:
            continue  # the template refuses it
        served = _served_ids(endpoint, conversation)
        asked += 1
        if served != expected:
            differing += 1
            cause = _cause(endpoint, tokenizer, conversation, expected, served)
            differences.setdefault(cause, _first_difference(tokenizer, expected, served))
    if not asked:
        return ServedPoint("unknown", f"the chat template takes none of {origin}")
    if not differences:
        return ServedPoint("right", f"{origin} have the ids of training")
    text = f"{differing} of {origin} have other ids than in training: {'; '.join(differences)}"
    return ServedPoint("wrong", text, differences=tuple(differences.values()))


def _served_ids(endpoint: Endpoint, conversation: Conversation, **settings: Any) -> list[int]:
    """Return the server's ids. The API of OpenAI takes a call's arguments as JSON in a text."""
    messages = []
    for message in conversation.messages:
        sent = dict(message)
        if message.get("tool_calls"):
            sent["tool_calls"] = []
        for call in message.get("tool_calls") or ():
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            function = {**call["function"], "arguments": arguments}
            sent["tool_calls"].append({"id": "call-0", **call, "function": function})
        # vLLM's /tokenize knows thoughts by the one name alone, and its chat by both.
        for key in REASONING:
            if message.get(key):
                sent |= {"reasoning": message[key], "reasoning_content": message[key]}
        messages.append(sent)
    return endpoint.conversation_ids(messages, conversation.tools, **settings)


def _first_difference(
    tokenizer: Tokenizer, expected: list[int], served: list[int]
) -> IdsDifference:
    """Return where two lists of ids differ first."""
    place = 0
    while expected[place : place + 1] == served[place : place + 1]:
        place += 1
    parts = (
        expected[max(0, place - _SHOWN_TOKENS) : place],
        expected[place : place + _SHOWN_TOKENS],
        served[place : place + _SHOWN_TOKENS],
    )
    return IdsDifference(*(tokenizer.decode(ids, skip_special_tokens=False) for ids in parts))


def _cause(
    endpoint: Endpoint,
    tokenizer: Tokenizer,
    conversation: Conversation,
    expected: list[int],
    served: list[int],
) -> str:
    """Return the cause of a difference: BOS, a switch, what is rendered, or some of them together; else the template."""
    causes = []
    bare = _without_bos(tokenizer, expected)
    more = len(served) - len(_without_bos(tokenizer, served)) - (len(expected) - len(bare))
    if more > 0:
        causes.append("a second BOS: the server adds one to that of the chat template")
    elif more < 0:
        causes.append("no BOS: the server leaves it out")
    rendered = [("", bare)]
    for cause, variant in _variants(conversation):
        with suppress(ValueError):
            ids = tokenizer.encode_prompt(variant.messages, variant.tools)
            rendered.append((cause, _without_bos(tokenizer, ids)))
    for switch in _SWITCHES:
        try:
            ids = _served_ids(endpoint, conversation, chat_template_kwargs=switch)
        except NotAnswered:
            continue
        for cause, known in rendered:
            if _without_bos(tokenizer, ids) != known:
                continue
            for name in switch:
                causes.append(
                    f"{name}: the server's default is the other one than in training; start it with "
                    f"--default-chat-template-kwargs '{json.dumps(switch)}', or send chat_template_kwargs"
                )
            return "; ".join(filter(None, [*causes, cause]))
    text = tokenizer.decode(expected, skip_special_tokens=False)
    with suppress(NotAnswered):
        if endpoint.text_ids(text) != tokenizer.encode_text(text, special=False):
            return "tokenizer: the server makes other ids of the same text"
    return (
        "template: the server has another chat template; start it with --chat-template and the export's "
        "chat_template.jinja"
    )


def _without_bos(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    return list(dropwhile(lambda token: token == tokenizer.bos_id, ids))


def _variants(conversation: Conversation) -> Iterator[tuple[str, Conversation]]:
    """Yield the conversation with one thing as a server may have it, and what that is."""
    thoughtless = []
    resorted = []
    for message in conversation.messages:
        thoughtless.append({k: v for k, v in message.items() if k not in REASONING})
        calls = []
        for call in message.get("tool_calls") or ():
            calls.append({**call, "function": dict(sorted(call["function"].items()))})
        resorted.append({**message, "tool_calls": calls} if calls else message)
    tools = conversation.tools
    cause = "thoughts dropped: the server leaves the reasoning of earlier turns out"
    yield cause, Conversation(tuple(thoughtless), tools)
    # vLLM's types have `arguments` before `name`, which a template that writes a call as JSON shows.
    cause = "key order of calls: the server writes a call's arguments before its name"
    yield cause, Conversation(tuple(resorted), tools)
    cause = "tool order: the server writes the tools in another order"
    for order in islice(permutations(tools), _ORDERS):
        yield cause, Conversation(conversation.messages, order)
