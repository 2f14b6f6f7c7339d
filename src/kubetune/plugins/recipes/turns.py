"""Turns of a conversation about an image: who says what, cleaned texts, and the one tag that stands for the image."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from kubetune.data.reading.fields import show, text_of
from kubetune.data.reading.formats import IMAGE_TAG
from kubetune.plugins.recipes.recipe import Skipped

_EMPTY_LINES: Final = re.compile(r"\A\s*\n")


class Turn(NamedTuple):
    """What one speaker says; its fields are those of a message."""

    role: str
    content: str


def messages(turns: Sequence[Turn]) -> list[dict[str, str]]:
    """Return turns as the messages of a row."""
    return [turn._asdict() for turn in turns]


def read_turns(
    record: Mapping[str, Any], keys: Sequence[str], roles: Mapping[tuple[str, ...], str]
) -> list[Turn]:
    """Return the turns of a record. Raise Skipped where one of them cannot be read.

    `keys` say who speaks, and `roles` which message that is: `{("human",): "user"}` of the key `from`.
    """
    conversation = record.get("conversations")
    if not isinstance(conversation, list) or not conversation:
        raise Skipped("no_conversations", "has no conversations")

    turns = []
    for number, turn in enumerate(conversation):
        where = f"conversations[{number}]"
        if not isinstance(turn, dict):
            raise Skipped("bad_turn", f"{where} is {show(turn)}; expected an object")

        # Some data sets name the speaker by several keys, such as `from` and `role`.
        speaker = tuple(str(turn.get(key)) for key in keys)
        if speaker not in roles:
            known = " or ".join("/".join(words) for words in roles)
            named = "/".join(keys)
            raise Skipped("bad_turn", f"{where} has {named} {'/'.join(speaker)}; expected {known}")

        text = clean_text(turn.get("value"), f"{where}.value")
        if not text:
            raise Skipped("empty_turn", f"{where}.value is empty")
        turns.append(Turn(roles[speaker], text))
    return turns


def clean_text(value: Any, where: str) -> str:
    """Return a text that can be trained on, trimmed. Raise Skipped for what is none."""
    try:
        return trimmed(text_of(value, where, may_be_empty=True))
    except ValueError as error:
        raise Skipped("bad_text", str(error)) from None


def trimmed(text: str) -> str:
    """Return a text without empty lines before it and white space after it.

    Its first line keeps its indentation, which matters in code.
    """
    text = text.rstrip()
    if text[:1].isspace():
        text = _EMPTY_LINES.sub("", text, count=1)
    return text


def with_one_tag(turns: Sequence[Turn], place: int, notes: Counter[str]) -> list[Turn]:
    """Return the turns with one image tag in all, in the turn at `place`.

    It is the first that the turn has, where it stands, or else one before its text:

        What is it? <image> And this <image>?    What is it? <image> And this ?
        What is it?                              <image>\\nWhat is it?
    """
    tagged = []
    for number, (role, text) in enumerate(turns):
        tags = text.count(IMAGE_TAG)
        if number == place:
            before, tag, after = text.partition(IMAGE_TAG)
            # The first tag stays where it is.
            if tag:
                tags -= 1
                if before.isspace():
                    before = ""
                text = before + tag + after.replace(IMAGE_TAG, "")
            else:
                text = f"{IMAGE_TAG}\n{text}"
        # Tags of other turns go, and the model sees the image once.
        elif tags:
            text = trimmed(text.replace(IMAGE_TAG, ""))
            if not text:
                raise Skipped("empty_turn", f"a turn says nothing but {IMAGE_TAG}")
        notes["image_tags_removed"] += tags
        tagged.append(Turn(role, text))
    return tagged
