"""Messages of conversations in every spelling, as the one form that chat templates read, and whether each is trained.

Spellings: OpenAI's, ShareGPT's (`from`, `value`), and contents in parts as OpenAI, transformers and LLaMA-Factory have
them. Nothing here knows the records that messages are in (formats.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from kubetune.data.column_names import REASONING
from kubetune.data.reading.fields import Fields, first_of, parsed, quoted, show, text_of
from kubetune.data.reading.strict_json import JsonObject

IMAGE_TAG: Final = "<image>"

ROLES: Final = ("system", "user", "assistant", "tool")

# What ShareGPT's data call the speakers, and the role of each.
SPEAKERS: Final = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "system": "system",
    "observation": "tool",
    "tool_response": "tool",
    "tool": "tool",
    "function_response": "tool",
}

# Who says a call that is JSON in a text: LLaMA-Factory's name, and ms-swift's.
_CALLERS: Final = ("function_call", "tool_call")

# Roles of OpenAI and Llama that are refused, and what to write instead.
_ROLES_TO_WRITE: Final = {
    "developer": "system, or make it the first message",
    "ipython": "tool",
}

# Keys that say whether a message, or a whole record, is trained: of OpenAI, axolotl, ms-swift, LLaMA-Factory, others.
SWITCHES: Final = (
    "weight", "train", "training", "loss", "loss_weight", "loss_scale", "loss_mask", "trainable"
)  # fmt: skip
# Keys that may mean "trained" or "hidden from training", depending on who wrote them.
_MASKS: Final = ("mask", "masked")
# Switches that mean nothing at a message of anybody but the assistant, as ms-swift has it.
_OF_ANSWERS_ONLY: Final = ("loss", "loss_scale")
# Keys under which axolotl's data say which characters of a message are trained.
_DETAILS: Final = ("train_detail", "training_detail")

_READ: Final = frozenset(("role", "content", "tool_calls", *REASONING))
# Keys that are used where the chat template names them, as many do.
OF_TEMPLATES: Final = ("messages[].name", "messages[].tool_call_id")
# What others call the `arguments` of a call; taken for none, they would be lost.
_LIKE_ARGUMENTS: Final = ("parameters", "args", "kwargs", "params", "input")

# Kinds of parts that contents are made of, and the keys under which these hold what they are.
_IMAGE_KINDS: Final = ("image", "image_url", "input_image")
_PATH_KEYS: Final = ("image", "image_url", "url", "path", "value")
_TEXT_KINDS: Final = ("text", "input_text", "output_text")
_THOUGHT_KINDS: Final = ("reasoning", "thinking")
_TEXT_KEYS: Final = ("text", "value", "content", "reasoning", "thinking")


class Turn(NamedTuple):
    """A message in the form that chat templates read."""

    message: JsonObject
    trained: bool | None  # what the data say of it; None where they say nothing
    where: str  # its place in the record, for messages to people: `messages[2]`


def read_all(
    messages: Sequence[Any],
    key: str,
    record: Fields,
) -> list[Turn]:
    """Return messages in any spelling. `key`: what the record has them under."""
    return [_read_any(message, f"{key}[{i}]", record) for i, message in enumerate(messages)]


def _read_any(message: Any, where: str, record: Fields) -> Turn:
    """Return a message that is spelt as OpenAI does, or as ShareGPT does, in a list that may hold either."""
    if isinstance(message, dict) and "from" in message and "role" not in message:
        return read_turn(message, where, record)
    return read_message(message, where, record)


def read_turn(turn: Any, where: str, record: Fields) -> Turn:
    """Return a message that is spelt as ShareGPT does, or as OpenAI does. Raise ValueError: what was expected."""
    if isinstance(turn, dict) and "role" in turn and "content" in turn:
        return read_message(turn, where, record)
    if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
        raise ValueError(f"{where} is {show(turn)}; expected an object with `from` and `value`")

    speaker = turn["from"]
    role = SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise ValueError(
            f"{where}.from is {show(speaker)}; expected human, gpt, system, function_call or observation"
        )

    # The message in OpenAI's form. A call is JSON in the text, and has no text beside it.
    is_call = speaker in _CALLERS
    rest = _without_nulls(turn)
    del rest["from"]
    rest.pop("value", None)
    _require_one_spelling(rest, role, where, is_call=is_call)

    content = turn["value"]
    if is_call:
        rest["tool_calls"] = _calls_in(content, f"{where}.value")
        content = ""

    return _turn(
        {"role": role, "content": content, **rest},
        where,
        record,
        "value",
    )


def _calls_in(content: Any, where: str) -> list[Any]:
    """Return the calls that a message holds in place of a text, as JSON of one or of a list."""
    if isinstance(content, (dict, list)):
        calls = content
    else:
        calls = parsed(text_of(content, where), where)
    return calls if isinstance(calls, list) else [calls]


def _require_one_spelling(
    message: JsonObject,
    role: str,
    where: str,
    *,
    is_call: bool,
) -> None:
    """Raise ValueError for a message of ShareGPT that has OpenAI's keys for the same thing as well."""
    for theirs, ours in (("content", "value"), ("role", "from"), ("tool_calls", "value")):
        if theirs not in message:
            continue
        if theirs == "role" and message["role"] == role:
            continue
        if theirs == "tool_calls" and not is_call:
            continue
        raise ValueError(f"{where} has both `{ours}` and `{theirs}`; expected one of them")


def read_message(message: Any, where: str, record: Fields) -> Turn:
    """Return a message with its role known, its content one string and its tool calls objects.

    Notes in the record keys that mean nothing here, and the images in its parts. Raise ValueError.
    """
    if not isinstance(message, dict):
        raise ValueError(
            f"{where} is {show(message)}; expected an object with `role` and `content`"
        )

    speaker = message.get("role")
    message = _without_nulls(message) | {"role": _role_of(message, where, record)}
    # ms-swift's agents: the call is the content.
    if speaker in _CALLERS:
        if message.get("tool_calls"):
            raise ValueError(f"{where} has both `content` and `tool_calls`; expected one of them")
        message["tool_calls"] = _calls_in(message.pop("content", None), f"{where}.content")
    # OpenAI's older name, for the only call of a message.
    call = message.pop("function_call", None)
    if call:
        if message.get("tool_calls"):
            raise ValueError(
                f"{where} has both `function_call` and `tool_calls`; expected one of them"
            )
        message["tool_calls"] = [call]

    return _turn(message, where, record, "content")


def read_history(history: Any) -> list[dict[str, str]]:
    """Return the messages of `history`, pairs of an earlier question and its answer. Raise ValueError for another.

    [["Who?", "Me."], ["When?", "Now."]] are four messages.
    """
    if not history:
        return []
    if not isinstance(history, list):
        raise ValueError(f"history is {show(history)}; expected a list of [question, answer]")
    messages = []
    for i, pair in enumerate(history):
        where = f"history[{i}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"{where} is {show(pair)}; expected [question, answer]")
        question, answer = pair
        messages.append({"role": "user", "content": text_of(question, where)})
        messages.append({"role": "assistant", "content": text_of(answer, where)})

    return messages


def _role_of(
    message: JsonObject,
    where: str,
    record: Fields,
) -> str:
    """Return the role of one of OpenAI's messages, also where it has an older or a newer name."""
    role = message.get("role")
    if role in ("function", "tool_response"):
        return "tool"
    if role in _CALLERS:
        return "assistant"
    if role == "developer" and where.endswith("[0]"):
        # OpenAI's newer name for the message of the system, which a conversation begins with.
        record.note_taken("developer", "the system's message")
        return "system"
    if role in ROLES:
        return str(role)

    state = f"is {show(role)}" if "role" in message else "is missing"
    advice = ""
    if isinstance(role, str) and role in _ROLES_TO_WRITE:
        advice = f"; write {_ROLES_TO_WRITE[role]}"
    raise ValueError(f"{where}.role {state}; expected system, user, assistant or tool{advice}")


def _without_nulls(value: JsonObject) -> JsonObject:
    return {key: item for key, item in value.items() if item is not None}


def _turn(
    message: JsonObject,
    where: str,
    record: Fields,
    content_key: str,
) -> Turn:
    """Return a message whose role is known with its other keys read. `content_key`: what the data call its content."""
    # What says whether the message is trained is taken out, so that no template prints it.
    role = message["role"]
    trained = _take_switches(message, role, where, record)
    if isinstance(message.get("content"), list):
        message = _joined(message, f"{where}.{content_key}", record)
    calls = message.get("tool_calls")
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise ValueError(
                f"{where}.tool_calls is {show(calls)}; expected a list of calls, by the assistant"
            )
        # Keys keep the order of the data, in which templates that print a whole message print them.
        message["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{i}]", record) for i, call in enumerate(calls)
        ]
    else:
        message.pop("tool_calls", None)

    _require_one_thought(message, where)

    place = f"{where}.{content_key}"
    if "content" not in message and not calls:
        expected = "; expected a text"
        if message.get("refusal"):
            expected = ", beside a `refusal`; put that there to have it learned"
        raise ValueError(f"{place} is missing{expected}")

    may_be_empty = bool(calls) or role in ("system", "tool")
    message["content"] = text_of(message.get("content", ""), place, may_be_empty=may_be_empty)

    for key in message.keys() - _READ:
        switch = key.strip().lower()
        if switch in SWITCHES:
            raise ValueError(f"{where} has the key {key!r}; did you mean `{switch}`?")
        record.note_unused(f"messages[].{key}")

    return Turn(message, trained, where)


def _require_one_thought(message: JsonObject, where: str) -> None:
    """Raise ValueError for reasoning that is no text, or that is under two keys and differs."""
    keys = [key for key in REASONING if key in message]
    # A tool may write the same thought under two names.
    texts = {text_of(message[key], f"{where}.{key}", may_be_empty=True) for key in keys}
    if len(texts) > 1:
        raise ValueError(f"{where} has different texts in {quoted(keys)}; expected one")


def _take_switches(
    message: JsonObject,
    role: str,
    where: str,
    record: Fields,
) -> bool | None:
    """Take what says whether a message is trained out of it. Return None where nothing says so.

    Raise ValueError for a weight that is neither 0 nor 1, for two that differ, and for what cannot be trained.
    """
    for key in _DETAILS:
        if message.pop(key, None):
            raise ValueError(
                f"{where}.{key} marks parts of a message; one is trained whole or not at all"
            )

    for key in _MASKS:
        if isinstance(message.get(key), (bool, int)):
            raise ValueError(
                f"{where}.{key} is {show(message[key])}; write `train: false` if a message is not to be trained"
            )

    # Several tools' switches may be beside each other, as long as they agree.
    switches: dict[str, bool] = {}
    for key in SWITCHES:
        value = message.pop(key, None)
        if value is None:
            continue
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise ValueError(
                f"{where}.{key} is {show(value)}; expected 0, 1, false or true: a message is trained or is not"
            )
        if role != "assistant" and key in _OF_ANSWERS_ONLY:
            record.note_unused(f"messages[].{key}")
            continue
        switches[key] = bool(value)

    if not switches:
        return None
    first, trained = next(iter(switches.items()))
    if len(set(switches.values())) > 1:
        raise ValueError(f"{where} says by {quoted(switches)} both that it is trained and not")
    if role != "assistant" and trained:
        raise ValueError(
            f"{where}.{first} would have a message of the {role} trained; only the assistant's answers are"
        )

    return trained


def _joined(
    message: JsonObject,
    where: str,
    record: Fields,
) -> JsonObject:
    """Return a message whose content is a list of parts with one text as its content.

    Reasoning and tool calls among the parts go to their own fields, images to those of the record:

        [{"type": "image"}, {"type": "text", "text": "What is it?"}]    →    "<image>What is it?"
    """
    texts: list[str] = []
    thoughts: list[str] = []
    calls = list(message.get("tool_calls") or [])
    for i, written_part in enumerate(message["content"]):
        place = f"{where}[{i}]"
        part = _without_nulls(written_part) if isinstance(written_part, dict) else {}
        kind = part.pop("type", None)
        # `"train": true` at each part of a message that is trained is no mistake.
        if any(part.get(key) not in (None, True, 1) for key in SWITCHES):
            raise ValueError(
                f"{place} is not to be trained, as a part of a message; one is trained whole or not"
            )

        # Each kind of part: an image, a call, a text, a thought.
        text_key = next((key for key in _TEXT_KEYS if isinstance(part.get(key), str)), None)
        if kind in _IMAGE_KINDS:
            _take_image(part, record)
            texts.append(IMAGE_TAG)
        elif kind == "tool_call" and "value" in part:
            call = part.pop("value")
            calls.append(parsed(call, place) if isinstance(call, str) else call)
        elif kind in _TEXT_KINDS and text_key is not None:
            texts.append(part.pop(text_key))
        elif kind in _THOUGHT_KINDS and text_key is not None:
            thoughts.append(part.pop(text_key))
        else:
            raise ValueError(
                f'{place} is {show(written_part)}; expected {{"type": "text", "text": …}}, {{"type": "image"}} for the '
                "next of `images`, or parts as LLaMA-Factory writes them: text, reasoning, tool_call, image_url"
            )

        # What was read of the part has been taken out of it.
        for key in part.keys() - set(SWITCHES):
            record.note_unused(f"messages[].content[].{key}")

    joined = {**message, "content": "".join(texts)}
    if thoughts:
        if any(message.get(key) for key in REASONING):
            raise ValueError(
                f"{where} holds reasoning, and so does the message beside it; expected one of them"
            )
        joined["reasoning_content"] = "".join(thoughts)

    if calls:
        joined["tool_calls"] = calls
    return joined


def _take_image(part: JsonObject, record: Fields) -> None:
    """Put the image that a part holds to those of the record. A part without any stands for the next of `images`."""
    key = first_of(_PATH_KEYS, part)
    if key is None:
        return
    # OpenAI has an object with the address, others the path itself.
    image = part.pop(key)
    if isinstance(image, dict):
        for detail in image.keys() - {"url", "path", "bytes"}:
            record.note_unused(f"messages[].content[].{key}.{detail}")
        image = image.get("url", image)
    record.images.append(image)


def _call(call: Any, where: str, record: Fields) -> JsonObject:
    """Return a tool call with its arguments as an object. OpenAI's API writes them as JSON text.

    A function alone, without the call around it, gets one:

        {"name": "f", "arguments": "{\\"a\\": 1}"}
        →  {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"{where} is {show(call)}; expected an object with the function's `name` and `arguments`"
        )

    arguments = _arguments(function, where)

    if function is call:
        unused = call.keys() - {"id", "type", "name", "arguments"}
    else:
        unused = call.keys() - {"id", "type", "function"}
        for key in function.keys() - {"name", "arguments"}:
            record.note_unused(f"messages[].tool_calls[].function.{key}")

    for key in unused:
        record.note_unused(f"messages[].tool_calls[].{key}")

    # The keys keep the order of the data, in which templates that print a whole call print them.
    function = {key: function[key] for key in function if key in ("name", "arguments")}
    function["arguments"] = arguments
    read: JsonObject = {}
    if call.get("type") is None:
        read["type"] = "function"
    for key in call:
        if key in ("id", "type", "function") and call[key] is not None:
            read[key] = call[key]
    read["function"] = function
    return read


def _arguments(function: JsonObject, where: str) -> JsonObject:
    """Return the arguments of a call as an object; an empty one where it has none."""
    arguments = function.get("arguments")
    if arguments is None:
        for key in _LIKE_ARGUMENTS:
            if function.get(key):
                raise ValueError(
                    f"{where} has no `arguments`, and `{key}` in their place; expected `arguments`"
                )
        return {}

    if isinstance(arguments, str):
        arguments = parsed(arguments, f"{where}.arguments")
    if not isinstance(arguments, dict):
        raise ValueError(
            f"{where}.arguments is {show(arguments)}; expected an object, or JSON text of one"
        )

    return arguments


def with_joined_calls(turns: Sequence[Turn], context: int) -> tuple[list[Turn], int]:
    """Return the turns with the calls after a text, or after a call, in one message with it, as a model says them.

    assistant "One moment.", function_call f, observation    →    assistant "One moment." with the call f, tool

    `context`: how many of them are a prompt; it is returned for the joined ones. Raise ValueError for the result of a
    call that nobody made.
    """
    _require_known_calls(turns)
    joined: list[Turn] = []
    length = context
    for i, turn in enumerate(turns):
        if joined and i != context and _is_one_turn(joined[-1], turn):
            before = joined.pop()
            calls = [*before.message.get("tool_calls", ()), *turn.message["tool_calls"]]
            message = {**turn.message, **before.message, "tool_calls": calls}
            joined.append(before._replace(message=message))
            length -= i < context
        else:
            joined.append(turn)
    return joined, length


def _is_one_turn(before: Turn, turn: Turn) -> bool:
    """True if a message is only a call, and the assistant's message before it is trained as it is."""
    roles = (before.message["role"], turn.message["role"])
    is_call = bool(turn.message.get("tool_calls")) and not turn.message["content"].strip()
    has_thoughts = all(any(t.message.get(key) for key in REASONING) for t in (before, turn))
    is_alike = before.trained == turn.trained and not has_thoughts
    return roles == ("assistant", "assistant") and is_call and is_alike


def _require_known_calls(turns: Sequence[Turn]) -> None:
    """Raise ValueError for the result of a tool that names a call which nobody made, where all calls have ids."""
    ids: list[Any] = []  # of the calls made so far; None for a call without one
    for turn in turns:
        for call in turn.message.get("tool_calls", ()):
            ids.append(call.get("id"))
        answered = turn.message.get("tool_call_id") if turn.message["role"] == "tool" else None
        if answered is None or not ids or None in ids or answered in ids:
            continue
        known = " or ".join(map(show, ids[-4:]))
        raise ValueError(
            f"{turn.where}.tool_call_id is {show(answered)}, which no call before it has; {known} is"
        )


def read_tools(record: Fields) -> tuple[Any, ...]:
    """Return the tools of a record as chat templates expect them, from `tools` or OpenAI's older `functions`.

    They may be a list, one schema, or JSON text of either; so may be each item. Raise ValueError for what is no schema.
    """
    schemas = []
    for key in ("tools", "functions"):
        tools = record.get(key) or []
        if isinstance(tools, str):
            tools = parsed(tools, key) or []
        if isinstance(tools, dict):
            tools = [tools]
        if not isinstance(tools, list):
            raise ValueError(f"{key} is {show(tools)}; expected a list of function schemas")
        for i, tool in enumerate(tools):
            schemas.append(_tool(tool, key, f"{key}[{i}]"))

    return tuple(schemas)


def _tool(tool: Any, key: str, where: str) -> JsonObject:
    if isinstance(tool, str):
        tool = parsed(tool, where)
    if not isinstance(tool, dict):
        raise ValueError(f"{key} is [… {show(tool)} …]; expected a list of function schemas")
    # The schema of a function alone gets the object around it that templates expect.
    if isinstance(tool.get("name"), str) and "function" not in tool:
        return {"type": "function", "function": _with_parameters(tool, where)}
    if isinstance(tool.get("function"), dict):
        return {**tool, "function": _with_parameters(tool["function"], f"{where}.function")}
    if not isinstance(tool.get("type"), str):
        raise ValueError(
            f"{where} is {show(tool)}; expected the schema of a function, with its `name`"
        )

    return tool


def _with_parameters(function: JsonObject, where: str) -> JsonObject:
    """Return the schema of a function with its parameters read, where they are JSON text."""
    if not isinstance(function.get("parameters"), str):
        return function
    return {**function, "parameters": parsed(function["parameters"], f"{where}.parameters")}
