"""The shapes that records come in, and the one normal form each is turned into.

A shape is recognised by its keys. Conversations of any spelling become `Chat`; nothing here knows tokens or files.
Adding a shape is one function and one line in SHAPES.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kubetune.data.images import data_address

Value = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation: messages with `role` and `content` and, where the answer calls tools, `tool_calls`.

    The first `context` messages are never trained, whoever speaks them. `images` are paths, or addresses of data, which
    images.py makes files of; where there are any, the contents hold one `<image>` for each, in their order.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[Any, ...] = ()
    context: int = 0
    images: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and the completion to be learnt."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Text:
    """A text, all of it to be learnt."""

    text: str


Label = str | int | float | tuple[str | int, ...] | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Labelled:
    """A text, or two, and its label: the name or number of a class, several of them, or a number to predict.

    A tuple of floats holds a 0.0 or 1.0 for every class.
    """

    text: str
    second: str | None
    label: Label


Example = Chat | Pair | Text | Labelled

IMAGE_TAG: Final = "<image>"

ROLES: Final = ("system", "user", "assistant", "tool")
_SPEAKERS: Final = {
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


def convert(
    value: Value, shape: str = "auto", columns: Mapping[str, str] | None = None, *, labelled: bool = False
) -> Example:
    """The normal form of a record.

    `shape` is a key of SHAPES or `auto`; `columns` maps the names expected to the names in the file; `labelled` says
    that the task is classification. Raises ValueError that says what was found and what was expected.
    """
    for expected, found in (columns or {}).items():
        if found not in value:
            raise ValueError(f"has no column {found!r}, which data.columns gives for {expected!r}; {_keys(value)}")
        value = {**{key: item for key, item in value.items() if key != found}, expected: value[found]}
    return SHAPES[detect(value, labelled=labelled) if shape == "auto" else shape](value)


def detect(value: Value, *, labelled: bool = False) -> str:
    """The shape of a record by its keys. Raises ValueError when it has none."""
    if labelled:
        return "labelled"
    if "messages" in value:
        return "messages"
    if "conversations" in value:
        return "sharegpt"
    if "instruction" in value and "output" in value:
        return "alpaca"
    if ("prompt" in value or "input" in value) and ("completion" in value or "output" in value):
        return "prompt_completion"
    if "text" in value:
        return "text"
    if "label" in value and ("sentence" in value or "premise" in value):
        return "labelled"
    raise ValueError(
        f"{_keys(value)}; expected `messages`, `prompt` and `completion`, `text`, `conversations`, or `instruction` "
        "and `output`; other names can be given in `data.columns`"
    )


def _from_messages(value: Value) -> Chat:
    messages = _list(value, "messages")
    return _chat(value, [_message(m, f"messages[{i}]") for i, m in enumerate(messages)])


def _from_pair(value: Value) -> Pair | Chat:
    prompt_key = "prompt" if "prompt" in value else "input"
    completion_key = "completion" if "completion" in value else "output"
    prompt, completion = _required(value, prompt_key), _required(value, completion_key)
    if isinstance(prompt, list) and isinstance(completion, list):
        before = [_message(m, f"{prompt_key}[{i}]") for i, m in enumerate(prompt)]
        after = [_message(m, f"{completion_key}[{i}]") for i, m in enumerate(completion)]
        if not before or not after:
            raise ValueError(f"{prompt_key if not before else completion_key} is empty; expected messages")
        return _chat(value, [*before, *after], context=len(before))
    prompt, completion = _text(prompt, prompt_key, may_be_empty=True), _text(completion, completion_key)
    if _images(value):
        roles = ({"role": "user", "content": prompt}, {"role": "assistant", "content": completion})
        return _chat(value, list(roles), context=1)
    return Pair(prompt, completion)


def _from_text(value: Value) -> Text:
    return Text(_text(_required(value, "text"), "text"))


def _from_sharegpt(value: Value) -> Chat:
    turns = _list(value, "conversations")
    messages = [_turn(turn, f"conversations[{i}]") for i, turn in enumerate(turns)]
    return _chat(value, [*_system(value), *messages])


def _turn(turn: Any, where: str) -> dict[str, Any]:
    if isinstance(turn, dict) and "role" in turn and "content" in turn:
        return _message(turn, where)
    if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
        raise ValueError(f"{where} is {_show(turn)}; expected an object with `from` and `value`")
    speaker = turn["from"]
    role = _SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise ValueError(f"{where}.from is {_show(speaker)}; expected human, gpt, system, function_call or observation")
    text = _text(turn["value"], f"{where}.value", may_be_empty=role == "system")
    if speaker == "function_call":
        calls = _parsed(text, f"{where}.value")
        calls = calls if isinstance(calls, list) else [calls]
        return {"role": role, "content": "", "tool_calls": [_call(c, f"{where}.value") for c in calls]}
    return {"role": role, "content": text}


def _from_alpaca(value: Value) -> Chat:
    instruction = _text(_required(value, "instruction"), "instruction", may_be_empty=bool(value.get("input")))
    extra = _text(value.get("input") or "", "input", may_be_empty=True)
    messages = list(_system(value))
    for i, pair in enumerate(value.get("history") or []):
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"history[{i}] is {_show(pair)}; expected [question, answer]")
        for role, text in zip(("user", "assistant"), pair, strict=True):
            messages.append({"role": role, "content": _text(text, f"history[{i}]")})
    messages.append({"role": "user", "content": "\n".join(part for part in (instruction, extra) if part)})
    messages.append({"role": "assistant", "content": _text(_required(value, "output"), "output")})
    return _chat(value, messages)


_PAIRS: Final = (
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text", "text_pair"),
)


def _from_labelled(value: Value) -> Labelled:
    text, second = texts_of(value)
    return Labelled(text, second, _label(_required(value, label_key(value, is_pair=second is not None))))


def label_key(value: Value, *, is_pair: bool) -> str:
    """The key that a record's label stands under: sets with several write `labels`, pairs to compare have a `score`."""
    spellings = ("label", "labels", "score") if is_pair else ("label", "labels")
    return next((key for key in spellings if key in value), "label")


def texts_of(value: Value) -> tuple[str, str | None]:
    """The text, or two, of a record to be classified. Raises ValueError where there is none."""
    pair = next((keys for keys in _PAIRS if all(key in value for key in keys)), None)
    keys = pair or next(((key,) for key in ("sentence", "text") if key in value), None)
    if keys is None:
        raise ValueError(f"{_keys(value)}; expected `sentence`, `text`, or `premise` and `hypothesis`, with `label`")
    texts = [_text(value[key], key) for key in keys]
    return texts[0], texts[1] if pair else None


def _label(label: Any) -> Label:
    if isinstance(label, str) and label.startswith("["):
        label = _parsed(label, "label")
    if isinstance(label, list):
        return _several(label)
    if isinstance(label, str) and label.removeprefix("-").isdecimal():
        label = int(label)
    is_no_number = isinstance(label, bool) or (isinstance(label, float) and not math.isfinite(label))
    if is_no_number or not isinstance(label, (int, float, str)) or label == "":
        raise ValueError(f"label is {_show(label)}; expected a class by name or number, a list of them, or a number")
    return label


def _several(labels: list[Any]) -> Label:
    if any(isinstance(item, float) for item in labels) and all(item in (0, 1) for item in labels):
        return tuple(1.0 if item else 0.0 for item in labels)
    if any(isinstance(name, bool) or not isinstance(name, (int, str)) for name in labels):
        what = "a list of names or numbers of classes, or 0.0 or 1.0 for every class"
        raise ValueError(f"label is {_show(labels)}; expected {what}")
    if len(set(labels)) < len(labels):
        what = "each class that applies once, by name or number; a 0 or 1 for every class is written 0.0 or 1.0"
        raise ValueError(f"label is {_show(labels)}; expected {what}")
    return tuple(labels)


SHAPES: Final[dict[str, Callable[[Value], Example]]] = {
    "messages": _from_messages,
    "prompt_completion": _from_pair,
    "text": _from_text,
    "sharegpt": _from_sharegpt,
    "alpaca": _from_alpaca,
    "labelled": _from_labelled,
}


def _chat(value: Value, messages: list[dict[str, Any]], context: int = 0) -> Chat:
    images = _images(value)
    if images is None:
        return Chat(tuple(messages), _tools(value), context)  # without images the tag is text like any other
    return Chat(tuple(_place_tags(messages, len(images))), _tools(value), context, images)


def _images(value: Value) -> tuple[str, ...] | None:
    """The images of a record, each a path or an address of data; None for a record that has no place for any."""
    key = "images" if value.get("images") is not None else "image"
    images = value.get(key)
    if images is None:
        return None
    images = [images] if isinstance(images, str | dict) else images
    if not isinstance(images, list):
        raise ValueError(f"{key} is {_show(images)}; expected a list of paths")
    return tuple(_image(image, f"{key}[{i}]") for i, image in enumerate(images))


def _image(image: Any, where: str) -> str:
    """The path of an image, or its bytes as an address of data; `datasets` gives both, and means the bytes."""
    if not isinstance(image, dict):
        return _text(image, where)
    path, content = image.get("path"), image.get("bytes")
    if not image.keys() <= {"path", "bytes"} or not isinstance(content, bytes | None):
        raise ValueError(f"{where} is {_show(image)}; expected a path, an address `data:image/…;base64,…`, or `path`")
    return data_address(content) if content is not None else _text(path, f"{where}.path")


def _place_tags(messages: list[dict[str, Any]], images: int) -> list[dict[str, Any]]:
    """The messages with as many tags as images: missing ones go before the first text of the user."""
    tags = sum(message["content"].count(IMAGE_TAG) for message in messages)
    if tags > images:
        raise ValueError(f"has {tags} {IMAGE_TAG} tags for {images} images; expected one tag for each image")
    if tags == images:
        return messages
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise ValueError(f"has {images} images, {tags} {IMAGE_TAG} tags and no message of the user to put more into")
    content = f"{IMAGE_TAG}\n" * (images - tags) + messages[first]["content"]
    return [*messages[:first], {**messages[first], "content": content}, *messages[first + 1 :]]


def _message(message: Any, where: str) -> dict[str, Any]:
    """A message with its role known, its content one string and its tool calls objects."""
    if not isinstance(message, dict):
        raise ValueError(f"{where} is {_show(message)}; expected an object with `role` and `content`")
    role = message.get("role")
    if role not in ROLES:
        found = f"is {_show(role)}" if "role" in message else "is missing"
        raise ValueError(f"{where}.role {found}; expected system, user, assistant or tool")
    clean = {key: item for key, item in message.items() if item is not None}
    if calls := clean.get("tool_calls"):
        if role != "assistant" or not isinstance(calls, list):
            raise ValueError(f"{where}.tool_calls is {_show(calls)}; expected a list of calls, by the assistant")
        clean["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    else:
        clean.pop("tool_calls", None)
    if "content" not in clean and not calls:
        raise ValueError(f"{where}.content is missing; expected a text")
    content = clean.get("content", "")
    if isinstance(content, list):
        content = _joined(content, f"{where}.content")
    clean["content"] = _text(content, f"{where}.content", may_be_empty=bool(calls) or role in ("system", "tool"))
    return clean


def _joined(parts: list[Any], where: str) -> str:
    texts = []
    for i, part in enumerate(parts):
        if part == {"type": "image"}:
            texts.append(IMAGE_TAG)
            continue
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f'{where}[{i}] is {_show(part)}; expected {{"type": "text", "text": …}}, or {{"type": "image"}} for '
                "the next of `images`"
            )
        texts.append(part["text"])
    return "".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    """A tool call whose arguments are an object; OpenAI's API writes them as JSON text, chat templates want objects."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where} is {_show(call)}; expected an object with the function's `name` and `arguments`")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{where}.arguments")
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else {"type": "function", "function": function}


def _tools(value: Value) -> tuple[Any, ...]:
    tools = value.get("tools") or []
    if isinstance(tools, str):
        tools = _parsed(tools, "tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"tools is {_show(tools)}; expected a list of function schemas")
    return tuple(tools)


def _system(value: Value) -> list[dict[str, Any]]:
    system = value.get("system")
    return [{"role": "system", "content": _text(system, "system")}] if system else []


def _required(value: Value, key: str) -> Any:
    if value.get(key) is None:
        raise ValueError(f"`{key}` is {'null' if key in value else 'missing'}; {_keys(value)}")
    return value[key]


def _list(value: Value, key: str) -> list[Any]:
    items = _required(value, key)
    if isinstance(items, str):
        items = _parsed(items, key)
    if not isinstance(items, list):
        raise ValueError(f"{key} is {_show(items)}; expected a list")
    if not items:
        raise ValueError(f"{key} is empty; expected at least one message")
    return items


def _text(value: Any, where: str, *, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} is {_show(value)}; expected a text")
    if not may_be_empty and not value.strip():
        raise ValueError(f"{where} is empty; expected a text")
    if "\0" in value:
        raise ValueError(f"{where} holds a NUL character at position {value.index(chr(0))}; expected text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where} holds half a surrogate pair at position {error.start}; expected text") from None
    return value


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is {_show(text)}, which is not JSON: {error}") from None


def _keys(value: Value) -> str:
    return "has the keys " + ", ".join(f"`{key}`" for key in list(value)[:12]) if value else "has no keys"


def _show(value: Any) -> str:
    """A value as JSON, cut short, for messages."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "…"
