"""Marks in the texts of a conversation, by which one sees where a chat template writes them, and what it leaves out.

A template is a program: how it frames messages cannot be read off it. So a conversation is rendered once as it is and
once with marks around every text in it; where the two are equal but for the marks, these say where each text stands.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

Message = Mapping[str, Any]
Kind = Literal["content", "reasoning", "call", "tool"]

IMAGE_MARK: Final = "\U000f7e00image\U000f7e01"
"""Stands for an image in the content of a message whose `IMAGE_TEXTS` say what is written in its place."""
REASONING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")

# Letters and digits only, so that a mark survives whatever a template does to a text (JSON, escapes, trimming); a hash,
# so that no text holds it, this file included.
_SIGN: Final = "m" + hashlib.sha256(b"a mark in a conversation").hexdigest()[:15]
_MARKS: Final = re.compile(rf"{_SIGN}x(\d+)([oc])")
_THINKING: Final = re.compile(r"</?think(?:ing)?>|\[/?THINK\]", re.IGNORECASE)
_BOUNDARIES: Final = re.compile(f"({_THINKING.pattern}|{IMAGE_MARK})", re.IGNORECASE)
# Templates look at how a question begins and ends (`<tool_response>`): marks stand inside of such tags.
_HEAD: Final = re.compile(r"(?:\s*<[^<>\s]{1,40}>)*\s*")
_TAIL: Final = re.compile(r"(?:<[^<>\s]{1,40}>\s*)+\Z")


class Part(NamedTuple):
    """A text of a conversation: of which message (-1 for the tools'), what it is, and itself without space around it.

    The space that was `before` and `after` it may be written or not.
    """

    message: int
    kind: Kind
    text: str
    before: str = ""
    after: str = ""


class Place(NamedTuple):
    """Place of a mark in a rendering that has lost its marks: before (`opens`) or after a part."""

    offset: int
    part: int
    opens: bool


@dataclass(frozen=True, slots=True)
class Marked:
    """A conversation with marks around its parts; `unmarked` are those that bear none."""

    messages: list[dict[str, Any]]
    tools: list[Any]
    parts: list[Part]
    unmarked: list[Part]


def probe(part: int) -> str:
    """A text to stand for part `part`."""
    return f"{_SIGN}x{part}oGo on.{_SIGN}x{part}c"


def read_marks(marked: str, parts: Sequence[Part] = ()) -> tuple[str, list[Place]]:
    """A rendering without its marks, and where they stood.

    The name of a tool may be written again with what the tool returned; then only its first place counts.
    """
    pieces = _MARKS.split(marked)
    places: list[Place] = []
    calls: set[tuple[int, str]] = set()
    at = len(pieces[0])
    for i in range(1, len(pieces), 3):
        part, side = int(pieces[i]), pieces[i + 1]
        if part >= len(parts) or parts[part].kind != "call" or (part, side) not in calls:
            places.append(Place(at, part, side == "o"))
            calls.add((part, side))
        at += len(pieces[i + 2])
    return "".join(pieces[::3]), places


def mark(messages: Sequence[Message], tools: Sequence[Any], *, calls: bool = True) -> Marked:
    """Mark every text of a conversation; without `calls` neither tool calls nor tools, which some templates compare."""
    marker = _Marker(calls)
    marked_tools = [marker.tool(tool) for tool in tools]
    marked = [marker.message(i, message) for i, message in enumerate(messages)]
    return Marked(marked, marked_tools, marker.parts, marker.unmarked)


class _Marker:
    def __init__(self, calls: bool) -> None:
        self.parts: list[Part] = []
        self.unmarked: list[Part] = []
        self._calls = calls

    def message(self, number: int, message: Message) -> dict[str, Any]:
        marked = dict(message)
        if not message.keys().isdisjoint(REASONING_FIELDS):
            marked |= self._reasoning(message, number)
        content = message.get("content")
        if isinstance(content, str):
            marked["content"] = self._content(content, number, message.get("role") == "assistant")
        if calls := message.get("tool_calls"):
            marked["tool_calls"] = [self._call(call, number) for call in calls]
        return marked

    def _reasoning(self, message: Message, number: int) -> dict[str, str]:
        """The fields of a message's reasoning, marked."""
        reasoning = next(
            (text for key in REASONING_FIELDS if isinstance(text := message.get(key), str)), ""
        )
        if not reasoning.strip():
            return {}
        written = self._around(reasoning, number, "reasoning")
        return {key: written for key in REASONING_FIELDS if message.get(key) == reasoning}

    def tool(self, tool: Any) -> Any:
        """A tool marked where its schema is described, or else named."""
        schema = tool.get("function", tool)
        key = "description" if _is_text(schema.get("description")) else "name"
        if not _is_text(schema.get(key)):
            return tool
        schema = {**schema, key: self._outside(schema[key], -1, "tool")}
        return {**tool, "function": schema} if "function" in tool else schema

    def _call(self, call: Any, number: int) -> Any:
        function = call["function"]
        arguments = self._leaves(function.get("arguments"), number)
        name = self._outside(function["name"], number, "call")
        return {**call, "function": {**function, "name": name, "arguments": arguments}}

    def _leaves(self, value: Any, number: int) -> Any:
        match value:
            case dict():
                return {key: self._leaves(item, number) for key, item in value.items()}
            case list():
                return [self._leaves(item, number) for item in value]
            case str() if value.strip():
                return self._outside(value, number, "call")
            case int() | float() if not isinstance(value, bool):
                self.unmarked.append(Part(number, "call", str(value)))
        return value

    def _content(self, content: str, number: int, is_answer: bool) -> str:
        """A content marked piece by piece, where it holds reasoning between tags or images."""
        if "<" not in content and "[" not in content and IMAGE_MARK not in content:
            return self._around(content, number, "content")
        pieces = _BOUNDARIES.split(content)
        if IMAGE_MARK not in content and not "".join(pieces[::2]).strip():
            return self._around(
                content, number, "content"
            )  # nothing but tags: then they are what is said
        thinking = is_answer and _opens_with_thought(pieces)
        for i in range(0, len(pieces), 2):
            if i and is_answer and _THINKING.fullmatch(pieces[i - 1]):
                thinking = "/" not in pieces[i - 1]
            head = 0 if i or is_answer else _length(_HEAD, pieces[i])
            tail = _length(_TAIL, pieces[i][head:]) if i == len(pieces) - 1 and not is_answer else 0
            end = len(pieces[i]) - tail
            if not pieces[i][head:end].strip():
                head, end = 0, len(pieces[i])
            text = self._around(pieces[i][head:end], number, "reasoning" if thinking else "content")
            pieces[i] = pieces[i][:head] + text + pieces[i][end:]
        return "".join(pieces)

    def _around(self, text: str, number: int, kind: Kind) -> str:
        """A text with marks inside of the space around it, which templates trim."""
        core = text.strip()
        if not core:
            return text
        part = len(self.parts)
        before = after = ""
        if len(core) < len(text):
            begin = text.index(core[0])
            before, after = text[:begin], text[begin + len(core) :]
        self.parts.append(Part(number, kind, core, before, after))
        return f"{before}{_SIGN}x{part}o{core}{_SIGN}x{part}c{after}"

    def _outside(self, text: str, number: int, kind: Kind) -> str:
        if self._calls:
            return self._around(text, number, kind)
        self.unmarked.append(Part(number, kind, text.strip()))
        return text


def _opens_with_thought(pieces: Sequence[str]) -> bool:
    """The first tag closes a thought: where the generation prompt has opened it, an answer only closes it."""
    return next(("/" in tag for tag in pieces[1::2] if _THINKING.fullmatch(tag)), False)


def _length(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.search(text)
    return match.end() - match.start() if match else 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def missing(marked: Marked, places: Sequence[Place], text: str) -> Iterator[Part]:
    """The parts that a rendering lacks, wholly or from one end on."""
    begun = {place.part for place in places if place.opens}
    ended = {place.part for place in places if not place.opens}
    if len(begun) < len(marked.parts) or len(ended) < len(marked.parts):
        yield from (
            part
            for number, part in enumerate(marked.parts)
            if number not in begun or number not in ended
        )
    yield from (part for part in marked.unmarked if part.text not in text)
