"""The shapes that records come in, and the one normal form each is turned into.

A shape is recognised by its keys. Conversations of any spelling become `Chat`; nothing here knows tokens or files.
Adding a shape is one function and one line in SHAPES.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeVar

from kubetune.config.schema import RecordKind
from kubetune.data.reading.fields import Fields, keys, listed, parsed, required, show, text_of
from kubetune.data.reading.images import data_address
from kubetune.data.reading.messages import IMAGE_TAG as IMAGE_TAG
from kubetune.data.reading.messages import (
    Turn,
    read_message,
    read_tools,
    read_turn,
    require_known_calls,
)
from kubetune.data.reading.preferences import Side, Unusable, judged_side_of, sides_of
from kubetune.data.reading.refusals import (
    DECIDING,
    is_obeyed,
    require_no_preference,
    require_readable,
    require_trained,
)

Value = Mapping[str, Any]

QUESTIONS: Final = ("question", "query", "instruction")
"""Names of what somebody asks, so that it goes through the chat template; a `prompt` may be any text."""
ANSWERS: Final = ("answer", "response", "completion", "output")


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation: messages with `role` and `content` and, where the answer calls tools, `tool_calls`.

    The first `context` messages are never trained, whoever speaks them, nor are those of `not_trained`, of which the
    data say so. `images` are paths, or addresses of data, which images.py makes files of; where there are any, the
    contents hold one `<image>` for each, in their order.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[Any, ...] = ()
    context: int = 0
    images: tuple[str, ...] = ()
    not_trained: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt, and the completion that is trained."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Text:
    """A text, trained from its start to its end."""

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


@dataclass(frozen=True, slots=True)
class Preference:
    """Two answers to one prompt, each as an example of its own, and by how much the chosen one is better, if known."""

    chosen: Chat | Pair
    rejected: Chat | Pair
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """An answer to a prompt, good or bad."""

    answer: Chat | Pair
    is_good: bool


Example = Chat | Pair | Text | Labelled | Preference | Judged
_E = TypeVar("_E", bound=Example)


def images_of(example: Example) -> tuple[str, ...]:
    """The images of a record; those of a pair once, which both answers go on from."""
    match example:
        case Preference(answer) | Judged(answer):
            return images_of(answer)
    return example.images if isinstance(example, Chat) else ()


def with_images(example: _E, place: Callable[[str], str]) -> _E:
    """The record with another place of each image."""
    match example:
        case Preference():
            chosen, rejected = (
                with_images(answer, place) for answer in (example.chosen, example.rejected)
            )
            return replace(example, chosen=chosen, rejected=rejected)
        case Judged():
            return replace(example, answer=with_images(example.answer, place))
        case Chat() if example.images:
            return replace(example, images=tuple(map(place, example.images)))
    return example


def convert(
    value: Value,
    shape: str = "auto",
    columns: Mapping[str, str] | None = None,
    *,
    kind: RecordKind = "text",
) -> Example:
    """The normal form of a record, of which nobody asks what was left aside; see `read`."""
    return read(value, shape, columns, kind=kind).example


class Reading(NamedTuple):
    """A record as it was understood."""

    example: Example
    unused: tuple[str, ...]  # keys that hold something and decide nothing
    taken: str = ""  # what keys were taken as whose names alone do not say it


def read(
    value: Value,
    shape: str = "auto",
    columns: Mapping[str, str] | None = None,
    *,
    kind: RecordKind = "text",
) -> Reading:
    """Return the normal form of a record, and which of its keys decide nothing or were taken as something.

    `shape` is a key of SHAPES or `auto`; `columns` maps the names expected to the names in the file; `kind` is what
    the task learns from. Raises ValueError that says what was found and what was expected, also for keys
    that would make another thing of the record than its texts say: preferences, media, settings of a template.
    """
    columns = columns or {}
    replaced = [
        expected
        for expected in columns
        if value.get(expected) is not None and expected not in columns.values()
    ]
    for expected, found in columns.items():
        if found not in value:
            raise ValueError(
                f"has no column {found!r}, which data.columns gives for {expected!r}; {keys(value)}"
            )
        value = {
            **{key: item for key, item in value.items() if key != found},
            expected: value[found],
        }
    require_trained(value)
    if kind not in ("text", "labelled"):
        example, unused = _read_preference(value, shape, kind)
        return Reading(example, _without_obeyed(sorted({*unused, *replaced}), value))
    if kind == "text" and shape not in ("labelled", "text"):
        require_no_preference(value, columns)
    record = Fields(value)
    for key in replaced:
        record.note_unused(key)
    shape = detect(value, kind=kind) if shape == "auto" else shape
    if SHAPES[shape] in (_from_messages, _from_sharegpt, _from_alpaca, _from_pair, _from_question):
        require_readable(record)
    whole = SHAPES[shape](record)
    unread = (
        key
        for key in columns
        if key not in DECIDING and record.holds(key) and not record.has_read(key)
    )
    if idle := next(unread, None):
        raise ValueError(
            f"is read as {shape}, in which `data.columns` has no `{idle}` ({columns[idle]!r} is given for it); set "
            "`data.format`, or leave it out"
        )
    return Reading(whole, _without_obeyed(record.unused, value), record.taken)


def _without_obeyed(unused: Sequence[str], value: Value) -> tuple[str, ...]:
    """Return the keys that decide nothing, without those that say what is done anyway, such as `weight: 1`."""
    return tuple(key for key in unused if not is_obeyed(key, value.get(key)))


def _read_preference(
    value: Value, shape: str, kind: RecordKind
) -> tuple[Preference | Judged, set[str]]:
    """Answers to be compared or judged, and the keys that hold something and decide nothing."""
    if shape in ("text", "labelled"):
        raise ValueError(
            f"is read as {shape} by `data.format`, which has no answers to compare; expected auto"
        )
    if kind == "judged":
        side, is_good = judged_side_of(value, shape)
        answer, unused = _read_side(side)
        return Judged(answer, is_good), unused
    margin = value.get("margin") if kind == "graded" else None
    if margin is not None:
        value = {key: item for key, item in value.items() if key != "margin"}
        if (
            isinstance(margin, bool)
            or not isinstance(margin, (int, float))
            or not math.isfinite(margin)
        ):
            raise ValueError(
                f"margin is {show(margin)}; expected a number: by how much the chosen answer is better"
            )
    (chosen, unused), (rejected, more) = map(_read_side, sides_of(value, shape))
    if chosen == rejected:
        raise Unusable("has the same answer as chosen and as rejected; expected two that differ")
    return Preference(chosen, rejected, None if margin is None else float(margin)), unused | more


def _read_side(side: Side) -> tuple[Chat | Pair, set[str]]:
    record = Fields(side.record)
    require_readable(record)
    try:
        answer = _from_pair(record)
    except ValueError as error:
        kind = Unusable if "is empty" in str(error) else ValueError
        raise kind(str(error).replace("completion", side.name)) from None
    if isinstance(answer, Chat) and all(
        m["role"] != "assistant" for m in answer.messages[answer.context :]
    ):
        raise ValueError(f"{side.name} holds no message of the assistant; expected the answer")
    return answer, set(record.unused)


def detect(value: Value, *, kind: RecordKind = "text") -> str:
    """The shape of a record by its keys, and by those that are null only where there are no others.

    Raises ValueError when it has none.
    """
    if kind == "labelled":
        return "labelled"
    for there in ({key for key in value if value[key] is not None}, value.keys()):
        for shape, *needed in _MARKS:
            if all(any(key in there for key in alternatives) for alternatives in needed):
                return str(shape)
    raise ValueError(
        f"{keys(value)}; expected `messages`, `prompt` and `completion`, `text`, `conversations`, `instruction` "
        "and `output`, or `question` and `answer`; other names can be given in `data.columns`"
    )


_MARKS: Final[tuple[tuple[Any, ...], ...]] = (
    ("messages", ("messages",)),
    ("sharegpt", ("conversations",)),
    ("alpaca", ("instruction",), ("output",)),
    ("prompt_completion", ("prompt", "input"), ("completion", "output")),
    ("text", ("text",)),
    ("question_answer", QUESTIONS, ANSWERS),
    ("prompt_completion", ("prompt", "input"), ANSWERS),
    ("labelled", ("label",), ("sentence", "premise")),
)
"""Each shape with the keys it is known by: one of each group."""


def _from_messages(record: Fields) -> Chat:
    messages = listed(record, "messages")
    return _chat(record, [_read_any(m, f"messages[{i}]", record) for i, m in enumerate(messages)])


def _read_any(message: Any, where: str, record: Fields) -> Turn:
    is_turn = isinstance(message, dict) and "from" in message and "role" not in message
    return (read_turn if is_turn else read_message)(message, where, record)


def _from_pair(record: Fields) -> Pair | Chat:
    prompt_key = _key_of(record, ("prompt", "input"), "the prompt, plain text")
    completion_key = _key_of(
        record, ("completion", "output", "response", "answer"), "its completion"
    )
    prompt, completion = required(record, prompt_key), required(record, completion_key)
    if prompt_key == "input" and record.holds("instruction"):
        raise ValueError(
            "has an `instruction` beside `input`, which would be lost; name its answer `output`"
        )
    if record.holds("history"):
        raise ValueError(
            "has a `history` beside its prompt, which would be lost; put all of it into `messages`"
        )
    if isinstance(prompt, list) and isinstance(completion, (list, dict, str)):
        completion = (
            [{"role": "assistant", "content": completion}]
            if isinstance(completion, str)
            else completion
        )
        completion = [completion] if isinstance(completion, dict) else completion
        before = [_read_any(m, f"{prompt_key}[{i}]", record) for i, m in enumerate(prompt)]
        after = [_read_any(m, f"{completion_key}[{i}]", record) for i, m in enumerate(completion)]
        if not before or not after:
            raise ValueError(
                f"{prompt_key if not before else completion_key} is empty; expected messages"
            )
        return _chat(record, [*before, *after], context=len(before))
    prompt, completion = (
        text_of(prompt, prompt_key, may_be_empty=True),
        text_of(completion, completion_key),
    )
    if _images(record):
        return _chat(record, [_spoken("user", prompt), _spoken("assistant", completion)], context=1)
    for key in ("system", "system_prompt", "tools", "functions"):
        if record.holds(key):
            raise ValueError(
                f"has `{key}` beside a prompt that is plain text and goes through no chat template, so it would be "
                "lost; put it into the prompt, or write `messages`"
            )
    return Pair(prompt, completion)


def _key_of(record: Fields, names: Sequence[str], meaning: str) -> str:
    """Return the first of these keys that holds something, the first of all if none does."""
    key = next((name for name in names if record.peek(name) is not None), None)
    if key is None:
        key = next((name for name in names if name in record), names[0])
    if key != names[0]:
        record.note_taken(key, meaning)
    return key


def _from_question(record: Fields) -> Chat:
    """Read a question and its answer under one of their names, as a conversation."""
    question = _only_key(record, (*QUESTIONS, "prompt", "input"), "question")
    answer = _only_key(record, ANSWERS, "answer")
    record.note_taken(question, "the user's message")
    record.note_taken(answer, "the assistant's")
    turns = _history(record)
    turns.append(_spoken("user", text_of(required(record, question), question)))
    turns.append(_spoken("assistant", text_of(required(record, answer), answer)))
    return _chat(record, turns)


def _only_key(record: Fields, names: Sequence[str], what: str) -> str:
    """Return the only one of these keys that holds something."""
    held = [name for name in names if record.holds(name)]
    if len(held) > 1:
        places = " and ".join(f"`{name}`" for name in held)
        raise ValueError(
            f"has {places}; expected one {what}, or `data.columns` that say which it is"
        )
    return held[0] if held else next((name for name in names if name in record), names[0])


def _spoken(role: str, content: str) -> Turn:
    return Turn({"role": role, "content": content}, None, role)


def _from_text(record: Fields) -> Text:
    return Text(text_of(required(record, "text"), "text"))


def _from_sharegpt(record: Fields) -> Chat:
    turns = listed(record, "conversations")
    return _chat(
        record, [read_turn(turn, f"conversations[{i}]", record) for i, turn in enumerate(turns)]
    )


def _from_alpaca(record: Fields) -> Chat:
    extra = record.get("input")
    extra = "" if extra is None else text_of(extra, "input", may_be_empty=True)
    instruction = text_of(
        required(record, "instruction"), "instruction", may_be_empty=bool(extra.strip())
    )
    turns = _history(record)
    turns.append(_spoken("user", "\n".join(part for part in (instruction, extra) if part)))
    turns.append(_spoken("assistant", text_of(required(record, "output"), "output")))
    return _chat(record, turns)


def _history(record: Fields) -> list[Turn]:
    """Return the turns before a question: pairs of an earlier question and its answer."""
    turns: list[Turn] = []
    history = record.get("history") or []
    if not isinstance(history, list):
        raise ValueError(f"history is {show(history)}; expected a list of [question, answer]")
    for i, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"history[{i}] is {show(pair)}; expected [question, answer]")
        for role, text in zip(("user", "assistant"), pair, strict=True):
            turns.append(_spoken(role, text_of(text, f"history[{i}]")))
    return turns


_PAIRS: Final = (
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text", "text_pair"),
)


def _from_labelled(value: Fields) -> Labelled:
    text, second = texts_of(value)
    return Labelled(
        text, second, _label(required(value, label_key(value, is_pair=second is not None)))
    )


def label_key(value: Value, *, is_pair: bool) -> str:
    """The key that a record's label stands under: sets with several write `labels`, pairs to compare have a `score`."""
    spellings = ("label", "labels", "score") if is_pair else ("label", "labels")
    return next((key for key in spellings if key in value), "label")


def texts_of(value: Value) -> tuple[str, str | None]:
    """The text, or two, of a record to be classified. Raises ValueError where there is none."""
    pair = next((names for names in _PAIRS if all(key in value for key in names)), None)
    names = pair or next(((key,) for key in ("sentence", "text") if key in value), None)
    if names is None:
        raise ValueError(
            f"{keys(value)}; expected `sentence`, `text`, or `premise` and `hypothesis`, with `label`"
        )
    texts = [text_of(value[key], key) for key in names]
    return texts[0], texts[1] if pair else None


_WHOLE_NUMBER: Final = re.compile(r"-?(0|[1-9]\d*)", re.ASCII)
"""A text that is a number, as a table writes it; `01`, `1_000` and `１` are names."""


def _label(label: Any) -> Label:
    """Return a label as it is read: without the space around a name, `true` and `false` as tables name them."""
    if isinstance(label, str):
        label = label.strip()
    if isinstance(label, str) and label.startswith("["):
        label = parsed(label, "label")
    if isinstance(label, list):
        return _several(label)
    if isinstance(label, bool):
        return str(label)
    if isinstance(label, str) and _WHOLE_NUMBER.fullmatch(label):
        label = int(label)
    is_no_number = isinstance(label, float) and not math.isfinite(label)
    if is_no_number or not isinstance(label, (int, float, str)) or label == "":
        raise ValueError(
            f"label is {show(label)}; expected a class by name or number, a list of them, or a number"
        )
    return label


def _several(labels: list[Any]) -> Label:
    says_of_every_class = all(isinstance(item, bool) for item in labels) or (
        any(isinstance(item, float) for item in labels) and all(item in (0, 1) for item in labels)
    )
    if labels and says_of_every_class:
        return tuple(1.0 if item else 0.0 for item in labels)
    if any(isinstance(name, bool) or not isinstance(name, (int, str)) for name in labels):
        what = "a list of names or numbers of classes, or 0.0 or 1.0 for every class"
        raise ValueError(f"label is {show(labels)}; expected {what}")
    labels = [name.strip() if isinstance(name, str) else name for name in labels]
    if len(set(labels)) < len(labels):
        what = "each class that applies once, by name or number; a 0 or 1 for every class is written 0.0 or 1.0"
        raise ValueError(f"label is {show(labels)}; expected {what}")
    return tuple(labels)


SHAPES: Final[dict[str, Callable[[Fields], Example]]] = {
    "messages": _from_messages,
    "prompt_completion": _from_pair,
    "text": _from_text,
    "sharegpt": _from_sharegpt,
    "alpaca": _from_alpaca,
    "question_answer": _from_question,
    "labelled": _from_labelled,
}


def _chat(record: Fields, turns: list[Turn], context: int = 0) -> Chat:
    if system := _system(record, turns):
        turns, context = [system, *turns], context + bool(context)
    if trained := next((turn.where for turn in turns[:context] if turn.trained), None):
        raise ValueError(f"{trained} says that it is trained; a prompt never is")
    require_known_calls(turns)
    not_trained = frozenset(i for i, turn in enumerate(turns) if turn.trained is False)
    messages = [turn.message for turn in turns]
    images, tools = _images(record), read_tools(record)
    if images is not None:  # without images the tag is text like any other
        messages = _place_tags(messages, len(images))
    return Chat(tuple(messages), tools, context, images or (), not_trained)


def _system(record: Fields, turns: list[Turn]) -> Turn | None:
    """The message of the system that stands beside the messages, unless it is the first of these."""
    found = {
        key: text
        for key in ("system", "system_prompt")
        if (text := record.get(key)) not in (None, "")
    }
    if not found:
        return None
    key, system = next(iter(found.items()))
    system = text_of(system, key)
    has_own = turns[0].message["role"] == "system"
    others = [*found.values(), *([turns[0].message["content"]] if has_own else [])]
    if any(other != system for other in others):
        raise ValueError(
            f"has `{key}` and another message of the system, which says something else; expected one"
        )
    return None if has_own else _spoken("system", system)


def _images(record: Fields) -> tuple[str, ...] | None:
    """The images of a record, each a path or an address of data; None for a record that has no place for any."""
    found = {key: images for key in ("images", "image") if (images := record.get(key)) is not None}
    if len([images for images in found.values() if images]) + bool(record.images) > 1:
        places = " and ".join(
            [*(f"`{key}`" for key in found), *(["its messages"] if record.images else [])]
        )
        raise ValueError(f"has images in {places}; expected them in one place")
    if record.images:
        return tuple(
            _image(image, f"image {i} of its messages") for i, image in enumerate(record.images, 1)
        )
    for key, images in sorted(found.items(), key=lambda pair: not pair[1]):
        images = [images] if isinstance(images, str | dict) else images
        if not isinstance(images, list):
            raise ValueError(f"{key} is {show(images)}; expected a list of paths")
        return tuple(_image(image, f"{key}[{i}]") for i, image in enumerate(images))
    return None


def _image(image: Any, where: str) -> str:
    """The path of an image, or its bytes as an address of data; `datasets` gives both, and means the bytes."""
    if not isinstance(image, dict):
        return text_of(image, where)
    path, content = image.get("path"), image.get("bytes")
    if not image.keys() <= {"path", "bytes"} or not isinstance(content, bytes | None):
        raise ValueError(
            f"{where} is {show(image)}; expected a path, an address `data:image/…;base64,…`, or `path`"
        )
    return data_address(content) if content is not None else text_of(path, f"{where}.path")


def _place_tags(messages: list[dict[str, Any]], images: int) -> list[dict[str, Any]]:
    """The messages with as many tags as images: missing ones go before the first text of the user."""
    tags = sum(message["content"].count(IMAGE_TAG) for message in messages)
    if tags > images:
        raise ValueError(
            f"has {tags} {IMAGE_TAG} tags for {images} images; expected one tag for each image"
        )
    if tags == images:
        return messages
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise ValueError(
            f"has {images} images, {tags} {IMAGE_TAG} tags and no message of the user to put more into"
        )
    content = f"{IMAGE_TAG}\n" * (images - tags) + messages[first]["content"]
    return [*messages[:first], {**messages[first], "content": content}, *messages[first + 1 :]]
