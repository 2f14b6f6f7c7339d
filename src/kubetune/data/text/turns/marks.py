"""Put marks around the texts of a conversation, to see where a chat template writes them and what it leaves out."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from kubetune.data.column_names import REASONING
from kubetune.data.reading.strict_json import JsonObject

Message = Mapping[str, Any]
Kind = Literal["content", "reasoning", "call", "tool"]

# Stands for an image in a content. The message's `IMAGE_TEXTS` say what is written in its place.
IMAGE_MARK: Final = "\U000f7e00image\U000f7e01"

# A mark holds letters and digits only, so that it survives whatever a template does to a text (JSON, escapes, trimming).
# It is a hash, so that no text holds it, not even this file.
_SIGN: Final = "m" + hashlib.sha256(b"a mark in a conversation").hexdigest()[:15]
_MARKS: Final = re.compile(rf"{_SIGN}x(\d+)([oc])")
# Tags around reasoning.
_THINKING: Final = re.compile(r"</?think(?:ing)?>|\[/?THINK\]", re.IGNORECASE)
_BOUNDARIES: Final = re.compile(f"({_THINKING.pattern}|{IMAGE_MARK})", re.IGNORECASE)
# Templates look at how a question begins and ends (`<tool_response>`), so marks are inside such tags.
_HEAD: Final = re.compile(r"(?:\s*<[^<>\s]{1,40}>)*\s*")
_TAIL: Final = re.compile(r"(?:<[^<>\s]{1,40}>\s*)+\Z")


class Part(NamedTuple):
    """One text of a conversation."""

    message: int  # number of its message, -1 for the tools
    kind: Kind
    text: str
    # White space around the text in the data, which a template may leave out.
    before: str = ""
    after: str = ""


class Mark(NamedTuple):
    """The place of a mark in a rendering."""

    offset: int  # in the text without marks
    part: int  # number of the part
    opens: bool  # True before the part, False after it


@dataclass(frozen=True, slots=True)
class MarkedConversation:
    """A conversation with marks around its parts."""

    messages: list[JsonObject]
    tools: list[Any]
    parts: list[Part]
    unmarked: list[Part]  # texts that bear no marks


@dataclass(frozen=True, slots=True)
class Rendering:
    """A text that a template wrote, and the places of the conversation's parts in it."""

    text: str
    conversation: MarkedConversation
    marks: list[Mark]

    def part(self, mark: Mark) -> Part:
        """Return the part that a mark belongs to."""
        return self.conversation.parts[mark.part]

    def missing(self) -> list[Part]:
        """Return the parts that the rendering lacks, completely or in part."""
        opened = {mark.part for mark in self.marks if mark.opens}
        closed = {mark.part for mark in self.marks if not mark.opens}

        # A template that cuts a text off writes one of its two marks.
        whole = opened & closed
        parts = self.conversation.parts
        absent = [part for number, part in enumerate(parts) if number not in whole]
        return absent + _not_in(self.text, self.conversation.unmarked)


def not_written(conversation: MarkedConversation, text: str) -> list[Part]:
    """Return the parts whose text is nowhere in a rendering, for renderings in which the marks cannot be seen."""
    return _not_in(text, [*conversation.parts, *conversation.unmarked])


def _not_in(text: str, parts: Sequence[Part]) -> list[Part]:
    return [part for part in parts if part.text not in text]


def probe(part: int) -> str:
    """Return a text with the marks of part `part`, to see where a template writes it."""
    return _marked("Go on.", part)


def _marked(text: str, part: int) -> str:
    return f"{_SIGN}x{part}o{text}{_SIGN}x{part}c"


def read_marks(marked: str, parts: Sequence[Part] = ()) -> tuple[str, list[Mark]]:
    """Return a rendering without its marks, and where the marks were.

    A template may repeat the name of a tool beside its result. Then only the first place counts.
    """
    # By its two groups the pattern splits into: text, number of a part, "o" or "c", text, number, …
    pieces = _MARKS.split(marked)

    marks: list[Mark] = []
    calls: set[tuple[int, str]] = set()
    offset = len(pieces[0])
    for i in range(1, len(pieces), 3):
        part = int(pieces[i])
        side = pieces[i + 1]
        is_call = part < len(parts) and parts[part].kind == "call"
        if not is_call or (part, side) not in calls:
            marks.append(Mark(offset, part, side == "o"))
            calls.add((part, side))
        # Offsets are those in the text without marks, so only what is between them counts.
        offset += len(pieces[i + 2])

    return "".join(pieces[::3]), marks


def mark_texts(
    messages: Sequence[Message],
    tools: Sequence[Any],
    *,
    calls: bool = True,
) -> MarkedConversation:
    """Mark every text of a conversation.

    Without `calls`, tool calls and tools get no marks: some templates compare them, and would write other texts.
    """
    marker = _Marker(calls)
    # Tools come first: parts are numbered in the order in which they are marked.
    marked_tools = [marker.tool(tool) for tool in tools]
    marked_messages = [marker.message(i, message) for i, message in enumerate(messages)]
    return MarkedConversation(
        marked_messages,
        marked_tools,
        marker.parts,
        marker.unmarked,
    )


class _Marker:
    """Marks one conversation, and lists its parts in the order in which they are marked."""

    def __init__(self, calls: bool) -> None:
        self.parts: list[Part] = []
        self.unmarked: list[Part] = []
        self._calls = calls

    def message(self, number: int, message: Message) -> JsonObject:
        marked = dict(message)
        if not message.keys().isdisjoint(REASONING):
            self._mark_reasoning(marked, number)

        content = message.get("content")
        if isinstance(content, str):
            is_answer = message.get("role") == "assistant"
            marked["content"] = self._content(content, number, is_answer)

        calls = message.get("tool_calls")
        if calls:
            marked["tool_calls"] = [self._call(call, number) for call in calls]
        return marked

    def _mark_reasoning(self, message: JsonObject, number: int) -> None:
        """Mark the reasoning of a message, which may be under several names."""
        texts: list[str] = []
        for key in REASONING:
            if isinstance(message.get(key), str):
                texts.append(message[key])

        # Templates read one of the names. The same text under another one gets the same marks, not others.
        if not texts or not texts[0].strip():
            return
        reasoning = texts[0]
        marked = self._around(reasoning, number, "reasoning")
        for key in REASONING:
            if message.get(key) == reasoning:
                message[key] = marked

    def tool(self, tool: Any) -> Any:
        """Return a tool with marks around its description, or around its name if it has none."""
        schema = tool.get("function", tool)
        key = "description" if _is_text(schema.get("description")) else "name"
        if not _is_text(schema.get(key)):
            return tool
        schema = {**schema, key: self._around_call(schema[key], -1, "tool")}
        if "function" in tool:
            return {**tool, "function": schema}
        return schema

    def _call(self, call: Any, number: int) -> Any:
        # Arguments come before the name: parts are numbered in the order in which they are marked.
        function = dict(call["function"])
        function["arguments"] = self._argument(function.get("arguments"), number)
        function["name"] = self._around_call(function["name"], number, "call")
        return {**call, "function": function}

    def _argument(self, value: Any, number: int) -> Any:
        match value:
            case dict():
                return {key: self._argument(item, number) for key, item in value.items()}
            case list():
                return [self._argument(item, number) for item in value]
            case str() if value.strip():
                return self._around_call(value, number, "call")
            case int() | float() if not isinstance(value, bool):
                # With marks it would be a text. Templates write numbers as JSON, so it can be looked for as it is.
                self.unmarked.append(Part(number, "call", str(value)))
        return value

    def _content(
        self,
        content: str,
        number: int,
        is_answer: bool,
    ) -> str:
        """Mark a content; in pieces, if it has images, or reasoning between tags.

        <think>⏎Warm.⏎</think>⏎⏎Yes   →   <think>⏎«0 Warm. 0»⏎</think>⏎⏎«1 Yes 1»
        """
        if "<" not in content and "[" not in content and IMAGE_MARK not in content:
            return self._around(content, number, "content")

        # Every second piece is a boundary: a tag of reasoning, or an image.
        pieces = _BOUNDARIES.split(content)
        if IMAGE_MARK not in content and not "".join(pieces[::2]).strip():
            return self._around(content, number, "content")  # only tags: they are the content

        thinking = is_answer and _opens_with_thought(pieces)
        for i in range(0, len(pieces), 2):
            if i and is_answer and _THINKING.fullmatch(pieces[i - 1]):
                thinking = "/" not in pieces[i - 1]
            # What a question's own tags enclose: templates look at those, so they stay in front.
            begin = 0
            end = len(pieces[i])
            if not is_answer:
                begin, end = _inside_tags(pieces[i], i == 0, i == len(pieces) - 1)
            kind: Kind = "reasoning" if thinking else "content"
            text = self._around(pieces[i][begin:end], number, kind)
            pieces[i] = pieces[i][:begin] + text + pieces[i][end:]

        return "".join(pieces)

    def _around(self, text: str, number: int, kind: Kind) -> str:
        """Put marks around a text, but within the white space around it, which templates trim."""
        core = text.strip()
        if not core:
            return text
        before = after = ""
        if len(core) < len(text):
            begin = text.index(core[0])
            before = text[:begin]
            after = text[begin + len(core) :]
        self.parts.append(Part(number, kind, core, before, after))
        return f"{before}{_marked(core, len(self.parts) - 1)}{after}"

    def _around_call(
        self,
        text: str,
        number: int,
        kind: Kind,
    ) -> str:
        """Put marks around a text of a tool or a call, if those are marked."""
        if self._calls:
            return self._around(text, number, kind)
        self.unmarked.append(Part(number, kind, text.strip()))
        return text


def _opens_with_thought(pieces: Sequence[str]) -> bool:
    """True if the first tag closes a thought, as if the generation prompt had opened it."""
    # The first tag decides: "Warm.</think>Yes" was opened before its text began.
    for tag in pieces[1::2]:
        if _THINKING.fullmatch(tag):
            return "/" in tag
    return False


def _inside_tags(
    piece: str,
    is_first: bool,
    is_last: bool,
) -> tuple[int, int]:
    """Return where a piece of a question begins and ends without the tags around the question."""
    begin = 0
    end = len(piece)
    if is_first:
        head = _HEAD.match(piece)
        if head is not None:
            begin = head.end()
    if is_last:
        tail = _TAIL.search(piece, begin)
        if tail is not None:
            end = tail.start()
    # A question of only tags is marked as a whole.
    if not piece[begin:end].strip():
        return 0, len(piece)
    return begin, end


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
