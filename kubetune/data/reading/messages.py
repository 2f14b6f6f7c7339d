"""Messages of conversations in every spelling, as the one form that chat templates read, and whether each is trained.

Spellings: OpenAI's, ShareGPT's (`from`, `value`), and contents in parts as OpenAI, transformers and LLaMA-Factory have
them. Nothing here knows the records that messages stand in (formats.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from kubetune.data.reading.fields import Fields, parsed, show, text_of

IMAGE_TAG: Final = "<image>"

ROLES: Final = ("system", "user", "assistant", "tool")
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
    "system": "system",
    "observation": "tool",
    "tool": "tool",
    "function_response": "tool",
}
_MEANT: Final = {
    "developer": "system, or make it the first message",
    "ipython": "tool",
    "tool_response": "tool",
    "tool_call": "assistant, with the call in `tool_calls`",
}
"""Roles of OpenAI, Llama and ms-swift's agents that are refused, and what stands for each here."""

SWITCHES: Final = (
    "weight", "train", "training", "loss", "loss_weight", "loss_scale", "loss_mask", "trainable"
)  # fmt: skip
"""Switches for learning a message, or a whole record: of OpenAI, axolotl, ms-swift, LLaMA-Factory and others."""
_MASKS: Final = ("mask", "masked")
"""Keys that switch it off, if they are switches: which way they are meant is not known."""
_OF_ANSWERS_ONLY: Final = ("loss", "loss_scale")
"""Switches that mean nothing at a message of anybody but the assistant, as ms-swift has it."""
_DETAILS: Final = ("train_detail", "training_detail")
"""Keys under which axolotl's data say which characters of a message are trained."""

_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
_READ: Final = frozenset(("role", "content", "tool_calls", *_REASONING))
OF_TEMPLATES: Final = ("messages[].name", "messages[].tool_call_id")
"""Keys that are used where the chat template names them, as many do."""
_LIKE_ARGUMENTS: Final = ("parameters", "args", "kwargs", "params", "input")
_PATH_KEYS: Final = ("image", "image_url", "url", "path", "value")
_TEXT_KINDS: Final = ("text", "input_text", "output_text")
"""Parts that are texts: of most tools, and of OpenAI's Responses."""
_TEXT_KEYS: Final = ("text", "value", "content", "reasoning", "thinking")


class Turn(NamedTuple):
    """A message, whether it says of itself that it is trained or not, and its place for messages to people."""

    message: dict[str, Any]
    trained: bool | None
    where: str


def read_turn(turn: Any, where: str, record: Fields) -> Turn:
    """A turn spelt as ShareGPT does, or as OpenAI does. Raises ValueError that says what was expected."""
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
    rest = {
        key: item for key, item in turn.items() if key not in ("from", "value") and item is not None
    }
    twins = {"content": "value", "role": "from"} | (
        {"tool_calls": "value"} if speaker == "function_call" else {}
    )
    if twin := next(
        (key for key in twins if key in rest and not (key == "role" and rest[key] == role)), None
    ):
        raise ValueError(f"{where} has both `{twins[twin]}` and `{twin}`; expected one of them")
    if speaker == "function_call":
        calls = parsed(text_of(turn["value"], f"{where}.value"), f"{where}.value")
        calls = calls if isinstance(calls, list) else [calls]
        rest["tool_calls"] = calls
        content: Any = ""
    else:
        content = turn["value"]
    return _turn({"role": role, "content": content, **rest}, where, record, "value")


def read_message(message: Any, where: str, record: Fields) -> Turn:
    """A message with its role known, its content one string and its tool calls objects.

    Notes in the record keys that mean nothing here, and the images in its parts. Raises ValueError.
    """
    if not isinstance(message, dict):
        raise ValueError(
            f"{where} is {show(message)}; expected an object with `role` and `content`"
        )
    role = "tool" if message.get("role") == "function" else message.get("role")
    if role == "developer" and where.endswith("[0]"):
        # OpenAI's newer name for the message of the system, which a conversation begins with.
        role = "system"
        record.note_taken("developer", "the system's message")
    if role not in ROLES:
        found = f"is {show(role)}" if "role" in message else "is missing"
        meant = f"; write {_MEANT[role]}" if isinstance(role, str) and role in _MEANT else ""
        raise ValueError(f"{where}.role {found}; expected system, user, assistant or tool{meant}")
    clean = {key: item for key, item in message.items() if item is not None} | {"role": role}
    if call := clean.pop("function_call", None):
        if clean.get("tool_calls"):
            raise ValueError(
                f"{where} has both `function_call` and `tool_calls`; expected one of them"
            )
        clean["tool_calls"] = [call]
    return _turn(clean, where, record, "content")


def _turn(clean: dict[str, Any], where: str, record: Fields, content_key: str) -> Turn:
    role = clean["role"]
    trained = _switch(clean, role, where, record)
    if isinstance(clean.get("content"), list):
        clean = _joined(clean, f"{where}.{content_key}", record)
    if calls := clean.get("tool_calls"):
        if role != "assistant" or not isinstance(calls, list):
            raise ValueError(
                f"{where}.tool_calls is {show(calls)}; expected a list of calls, by the assistant"
            )
        clean["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{i}]", record) for i, call in enumerate(calls)
        ]
    else:
        clean.pop("tool_calls", None)
    thoughts = {
        key: text_of(clean[key], f"{where}.{key}", may_be_empty=True)
        for key in _REASONING
        if key in clean
    }
    if len(set(thoughts.values())) > 1:
        raise ValueError(
            f"{where} has different texts in {' and '.join(f'`{key}`' for key in thoughts)}; expected one"
        )
    if "content" not in clean and not calls:
        beside = (
            ", beside a `refusal`; put that there to have it learned"
            if clean.get("refusal")
            else ""
        )
        raise ValueError(f"{where}.{content_key} is missing{beside or '; expected a text'}")
    may_be_empty = bool(calls) or role in ("system", "tool")
    clean["content"] = text_of(
        clean.get("content", ""), f"{where}.{content_key}", may_be_empty=may_be_empty
    )
    for key in clean.keys() - _READ:
        if (switch := key.strip().lower()) in SWITCHES:
            raise ValueError(f"{where} has the key {key!r}; did you mean `{switch}`?")
        record.note_unused(f"messages[].{key}")
    return Turn(clean, trained, where)


def _switch(clean: dict[str, Any], role: str, where: str, record: Fields) -> bool | None:
    """Take what says whether a message is trained out of it; None where nothing does.

    Raises ValueError for a weight that is neither 0 nor 1, for two that differ, and for what cannot be trained.
    """
    for key in _DETAILS:
        if clean.pop(key, None):
            raise ValueError(
                f"{where}.{key} marks parts of a message; one is trained whole or not at all"
            )
    if mask := next((key for key in _MASKS if isinstance(clean.get(key), (bool, int))), None):
        raise ValueError(
            f"{where}.{mask} is {show(clean[mask])}; write `train: false` where a message is not trained"
        )
    said: dict[str, bool] = {}
    for key in SWITCHES:
        if (found := clean.pop(key, None)) is None:
            continue
        if not isinstance(found, (bool, int, float)) or found not in (0, 1):
            raise ValueError(
                f"{where}.{key} is {show(found)}; expected 0, 1, false or true: a message is trained or is not"
            )
        if role != "assistant" and key in _OF_ANSWERS_ONLY:
            record.note_unused(f"messages[].{key}")
            continue
        said[key] = bool(found)
    if len(set(said.values())) > 1:
        raise ValueError(
            f"{where} says by {' and '.join(f'`{key}`' for key in said)} both that it is trained and not"
        )
    if role != "assistant" and any(said.values()):
        key = next(iter(said))
        raise ValueError(
            f"{where}.{key} would have a message of the {role} trained; only the assistant's answers are"
        )
    return next(iter(said.values()), None)


def _joined(message: dict[str, Any], where: str, record: Fields) -> dict[str, Any]:
    """A message whose content is a list of parts, with one text: reasoning and tool calls go to their own fields."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls = list(message.get("tool_calls") or [])
    for i, given in enumerate(message["content"]):
        place = f"{where}[{i}]"
        part = (
            {key: item for key, item in given.items() if item is not None}
            if isinstance(given, dict)
            else {}
        )
        kind = part.pop("type", None)
        if any(part.get(key) not in (None, True, 1) for key in SWITCHES):
            raise ValueError(
                f"{place} is not to be trained, as a part of a message; one is trained whole or not"
            )
        if kind in ("image", "image_url", "input_image"):
            _take_image(part, place, record)
            texts.append(IMAGE_TAG)
        elif kind == "tool_call" and "value" in part:
            call = part.pop("value")
            calls.append(parsed(call, place) if isinstance(call, str) else call)
        elif kind in (*_TEXT_KINDS, "reasoning", "thinking") and any(
            isinstance(part.get(key), str) for key in _TEXT_KEYS
        ):
            key = next(key for key in _TEXT_KEYS if isinstance(part.get(key), str))
            (texts if kind in _TEXT_KINDS else reasoning).append(part.pop(key))
        else:
            raise ValueError(
                f'{place} is {show(given)}; expected {{"type": "text", "text": …}}, {{"type": "image"}} for the next '
                "of `images`, or parts as LLaMA-Factory writes them: text, reasoning, tool_call, image_url"
            )
        for key in part.keys() - set(SWITCHES):
            record.note_unused(f"messages[].content[].{key}")
    if reasoning and any(message.get(key) for key in _REASONING):
        raise ValueError(
            f"{where} holds reasoning, and so does the message beside it; expected one of them"
        )
    more = ({"reasoning_content": "".join(reasoning)} if reasoning else {}) | (
        {"tool_calls": calls} if calls else {}
    )
    return {**message, "content": "".join(texts), **more}


def _take_image(part: dict[str, Any], where: str, record: Fields) -> None:
    """Put the image that a part holds to those of the record; one without any stands for the next of `images`."""
    given = [key for key in _PATH_KEYS if key in part]
    if not given:
        return
    image = part.pop(given[0])
    for key in image.keys() - {"url", "path", "bytes"} if isinstance(image, dict) else ():
        record.note_unused(f"messages[].content[].{given[0]}.{key}")
    record.images.append(image["url"] if isinstance(image, dict) and "url" in image else image)


def _call(call: Any, where: str, record: Fields) -> dict[str, Any]:
    """A tool call whose arguments are an object; OpenAI's API writes them as JSON text, chat templates want objects."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"{where} is {show(call)}; expected an object with the function's `name` and `arguments`"
        )
    arguments = function.get("arguments")
    if arguments is None:
        if other := next((key for key in _LIKE_ARGUMENTS if function.get(key)), None):
            raise ValueError(
                f"{where} has no `arguments`, and `{other}` in their place; expected `arguments`"
            )
        arguments = {}
    if isinstance(arguments, str):
        arguments = parsed(arguments, f"{where}.arguments")
    if not isinstance(arguments, dict):
        raise ValueError(
            f"{where}.arguments is {show(arguments)}; expected an object, or JSON text of one"
        )
    ours = {"name", "arguments"}
    for key in call.keys() - {"id", "type"} - (ours if function is call else {"function"}):
        record.note_unused(f"messages[].tool_calls[].{key}")
    for key in function.keys() - ours if function is not call else ():
        record.note_unused(f"messages[].tool_calls[].function.{key}")
    written = {key: function[key] for key in function if key in ours} | {"arguments": arguments}
    # In the order given, in which templates that write whole calls write them.
    own = {
        key: call[key]
        for key in call
        if key in ("id", "type", "function") and call[key] is not None
    }
    return {**({} if "type" in own else {"type": "function"}), **own, "function": written}


def require_known_calls(turns: Sequence[Turn]) -> None:
    """Raise ValueError for the result of a tool that names a call which nobody made, where calls have ids."""
    made: list[Any] = []
    for turn in turns:
        made += [call.get("id") for call in turn.message.get("tool_calls", ())]
        answered = turn.message.get("tool_call_id") if turn.message["role"] == "tool" else None
        if answered is not None and made and None not in made and answered not in made:
            known = " or ".join(map(show, made[-4:]))
            raise ValueError(
                f"{turn.where}.tool_call_id is {show(answered)}, which no call before it has; {known} is"
            )


def read_tools(record: Fields) -> tuple[Any, ...]:
    """The tools of a record as chat templates expect them, from `tools` or OpenAI's older `functions`.

    They may be a list, one schema, or JSON text of either; so may each be. Raises ValueError for what is no schema.
    """
    found = []
    for key in ("tools", "functions"):
        given = record.get(key) or []
        if isinstance(given, str):
            given = parsed(given, key) or []
        given = [given] if isinstance(given, dict) else given
        if not isinstance(given, list):
            raise ValueError(f"{key} is {show(given)}; expected a list of function schemas")
        found += [_tool(tool, key, f"{key}[{i}]") for i, tool in enumerate(given)]
    return tuple(found)


def _tool(tool: Any, key: str, where: str) -> dict[str, Any]:
    if isinstance(tool, str):
        tool = parsed(tool, where)
    if not isinstance(tool, dict):
        raise ValueError(f"{key} is [… {show(tool)} …]; expected a list of function schemas")
    if isinstance(tool.get("name"), str) and "function" not in tool:
        return {"type": "function", "function": _with_parameters(tool, where)}
    if isinstance(tool.get("function"), dict):
        return {**tool, "function": _with_parameters(tool["function"], f"{where}.function")}
    if not isinstance(tool.get("type"), str):
        raise ValueError(
            f"{where} is {show(tool)}; expected the schema of a function, with its `name`"
        )
    return tool


def _with_parameters(function: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(function.get("parameters"), str):
        return function
    return {**function, "parameters": parsed(function["parameters"], f"{where}.parameters")}
