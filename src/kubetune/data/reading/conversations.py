"""Conversations of a record: its messages with what is beside them, and prompts that one or more answers go on from.

The system's text, tools and images are keys of the record beside its messages; each is read into every conversation.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from kubetune.data.reading.examples import Chat, Pair
from kubetune.data.reading.fields import Empty, Fields, show, text_of
from kubetune.data.reading.images import data_address
from kubetune.data.reading.messages import (
    IMAGE_TAG,
    Turn,
    read_all,
    read_tools,
    with_joined_calls,
)
from kubetune.data.reading.strict_json import JsonObject


class Beginning:
    """The prompt of one or more answers, in messages or as plain text. It is read once for all of them."""

    def __init__(
        self,
        record: Fields,
        prompt: Any,
        key: str = "prompt",
    ) -> None:
        """`prompt`: what the record holds under the `key`."""
        if record.holds("history"):
            raise ValueError(
                "has a `history` besides its prompt, which would be lost; put all of it into `messages`"
            )
        self._beside = Beside(record)
        self._record = record
        self._prompt = prompt
        self._key = key
        # Its messages, and the images in them; none before the first answer is read.
        self._turns: list[Turn] | None = None
        self._images: list[Any] = []

    def answered(self, answer: Any, key: str) -> Chat | Pair:
        """Return the prompt with an answer, which the record holds under the `key`. Raise ValueError if it is none."""
        # A prompt in messages, with an answer in messages or as text.
        if isinstance(self._prompt, list) and isinstance(answer, (list, dict, str)):
            return self._conversation(answer, key)

        # Two texts, which go through the chat template only where there are images.
        prompt = text_of(self._prompt, self._key, may_be_empty=True)
        completion = text_of(answer, key)
        if self._beside.images():
            turns = [spoken("user", prompt), spoken("assistant", completion)]
            return chat(self._beside, turns, context=1)

        for name in ("system", "system_prompt", "tools", "functions"):
            if self._record.holds(name):
                raise ValueError(
                    f"has `{name}` beside a prompt that is plain text and goes through no chat template, so it would be "
                    "lost; put it into the prompt, or write `messages`"
                )

        return Pair(prompt, completion)

    def _conversation(self, answer: list[Any] | JsonObject | str, key: str) -> Chat:
        if isinstance(answer, str):
            answer = {"role": "assistant", "content": answer}
        if isinstance(answer, dict):
            answer = [answer]
        if self._turns is None:
            self._turns = read_all(self._prompt, self._key, self._record)
            self._images = self._record.images
        # Of another answer the record holds none.
        self._record.images = [*self._images]
        after = read_all(answer, key, self._record)
        for name, turns in ((self._key, self._turns), (key, after)):
            if not turns:
                raise Empty(f"{name} is empty; expected messages")
        return chat(self._beside, [*self._turns, *after], context=len(self._turns))


def spoken(role: str, content: str) -> Turn:
    """Return a message of which the data say nothing but its text."""
    return Turn({"role": role, "content": content}, None, role)


class Beside:
    """The keys beside the messages of a record: system, tools, images. All of its conversations share them."""

    def __init__(self, record: Fields) -> None:
        self._record = record

    @cached_property
    def tools(self) -> tuple[Any, ...]:
        """Schemas of the tools."""
        return read_tools(self._record)

    def system(self, first: Turn) -> Turn | None:
        """Return the message of the system; None where there is none, or if the messages begin with it."""
        if not self._system:
            return None
        key, text = next(iter(self._system.items()))
        system = text_of(text, key)
        # Whoever repeats it must say the same, or one of the two would be lost.
        has_system = first.message["role"] == "system"
        others = list(self._system.values())
        if has_system:
            others.append(first.message["content"])
        if any(other != system for other in others):
            raise ValueError(
                f"has `{key}` and another message of the system, which says something else; expected one"
            )

        return None if has_system else spoken("system", system)

    @cached_property
    def _system(self) -> JsonObject:
        """The texts of the system by their keys. The same text may be written several times."""
        texts = {}
        for key in ("system", "system_prompt"):
            text = self._record.get(key)
            if text not in (None, ""):
                texts[key] = text
        return texts

    def images(self) -> tuple[str, ...] | None:
        """Return the images, each a path or an address of data; None where there is no place for any."""
        in_messages = self._record.images
        # Two columns may be there, as tables have them, but only one place may hold images.
        filled = [key for key, images in self._columns.items() if images]
        if len(filled) + bool(in_messages) > 1:
            places = [f"`{key}`" for key in self._columns]
            if in_messages:
                places.append("its messages")
            raise ValueError(f"has images in {' and '.join(places)}; expected them in one place")

        if in_messages:
            return tuple(
                _image(image, f"image {i} of its messages")
                for i, image in enumerate(in_messages, 1)
            )
        return self._in_column

    @cached_property
    def _columns(self) -> JsonObject:
        """The columns for images that are there."""
        columns = {}
        for key in ("images", "image"):
            images = self._record.get(key)
            if images is not None:
                columns[key] = images
        return columns

    @cached_property
    def _in_column(self) -> tuple[str, ...] | None:
        """The images of the column that holds some; None if there is no column."""
        if not self._columns:
            return None
        filled = [key for key, images in self._columns.items() if images]
        key = filled[0] if filled else next(iter(self._columns))
        images = self._columns[key]
        if isinstance(images, str | dict | bytes):
            images = [images]
        if not isinstance(images, list):
            raise ValueError(f"{key} is {show(images)}; expected a list of paths")
        return tuple(_image(image, f"{key}[{i}]") for i, image in enumerate(images))


def chat(
    beside: Beside,
    turns: list[Turn],
    context: int = 0,
) -> Chat:
    """Return a conversation with what is beside its messages. `context`: how many of them are a prompt."""
    system = beside.system(turns[0])
    if system is not None:
        turns = [system, *turns]
        if context:
            context += 1

    for turn in turns[:context]:
        if turn.trained:
            raise ValueError(f"{turn.where} says that it is trained; a prompt never is")
    turns, context = with_joined_calls(turns, context)

    messages = [turn.message for turn in turns]
    images = beside.images()
    tools = beside.tools
    if images is not None:  # without images the tag is text like any other
        messages = _place_tags(messages, len(images))
    not_trained = frozenset(i for i, turn in enumerate(turns) if turn.trained is False)
    return Chat(tuple(messages), tools, context, images or (), not_trained)


def _image(image: Any, where: str) -> str:
    """Return the path of an image, or its bytes as an address of data; `datasets` gives both, and means the bytes."""
    if isinstance(image, bytes):
        return data_address(image)
    if not isinstance(image, dict):
        return text_of(image, where)
    content = image.get("bytes")
    if not image.keys() <= {"path", "bytes"} or not isinstance(content, bytes | None):
        raise ValueError(
            f"{where} is {show(image)}; expected a path, an address `data:image/…;base64,…`, or `path`"
        )
    if content is not None:
        return data_address(content)
    return text_of(image.get("path"), f"{where}.path")


def _place_tags(messages: list[JsonObject], images: int) -> list[JsonObject]:
    """Return the messages with as many tags as images. Missing tags go before the first text of the user:

    two images and the question "Which is older?"    →    "<image>\n<image>\nWhich is older?"
    """
    tags = sum(message["content"].count(IMAGE_TAG) for message in messages)
    if tags > images:
        raise ValueError(
            f"has {tags} {IMAGE_TAG} tags for {images} images; expected one tag for each image"
        )
    if tags == images:
        return messages
    for i, message in enumerate(messages):
        if message["role"] == "user":
            content = f"{IMAGE_TAG}\n" * (images - tags) + message["content"]
            return [
                *messages[:i],
                {**message, "content": content},
                *messages[i + 1 :],
            ]

    raise ValueError(
        f"has {images} images, {tags} {IMAGE_TAG} tags and no message of the user to put more into"
    )
