"""Find the span of each turn in a rendering: from after the generation prompt to after the end-of-turn token.

The package's drawing shows what is compared. The cases below come from templates in use: one that writes its last turn
unlike those before (gpt-oss), one whose prompt opens a thought (DeepSeek-R1), one that trims texts (Gemma).

Words of this module, for `user "Ping"`, `assistant "Pong"`, each text between its two marks:

    …user⏎«0 Ping 0»<|im_end|>⏎<|im_start|>assistant⏎«1 Pong 1»<|im_end|>⏎
                    └───────────── gap ─────────────┘          └── gap ──┘
                    └─ end ──┘ └────── header ──────┘          └─ end ──┘
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple, Protocol

from kubetune.data.text.turns.marks import (
    Kind,
    Mark,
    Message,
    Part,
    Rendering,
    mark_texts,
    probe,
    read_marks,
)

Span = tuple[int, int]
# Of each part of a conversation, the number of its message and what it is.
Shape = tuple[tuple[int, Kind], ...]

# Tags by their shape, for those that are no tokens of the tokenizer.
_SHAPES: Final = r"<[^<>\s]+>|\[/?[A-Z_]+\]|\[\|[^\[\]|\s]+\|\]"
_MOST_KEPT_FRAMES: Final = 4096
_MOST_KEPT_LAYOUTS: Final = 256


def tag_pattern(tokens: Iterable[str] = ()) -> re.Pattern[str]:
    """Return the pattern of what counts as a tag, in one group: tokens of the tokenizer, and texts in their shape."""
    # The longest first: of `<|im|>` and `<|im|>s`, a pattern takes the first that fits.
    ordered = sorted(tokens, key=len, reverse=True)
    return re.compile(f"({'|'.join([*map(re.escape, ordered), _SHAPES])})")


class Write(Protocol):
    """Writes a conversation as the template does. Raise ValueError if the template refuses it."""

    def __call__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        *,
        generation_prompt: bool = False,
    ) -> str: ...


class HiddenText(ValueError):
    """The template changes the texts of a conversation, so their places cannot be seen."""


class _Layout(NamedTuple):
    """The texts that a template writes around the parts of all conversations of one shape."""

    # (text before a part, number of the part)
    steps: list[tuple[str, int]]
    # The text after the last part.
    end: str

    def find(self, parts: Sequence[Part], text: str) -> list[Mark] | None:
        """Return where the parts are in a text with this layout, None for a text with another layout."""
        marks: list[Mark] = []
        offset = 0
        for before, part in self.steps:
            core = parts[part].text
            if not text.startswith(before, offset):
                return None
            offset += len(before)
            if not text.startswith(core, offset):
                return None
            marks.append(Mark(offset, part, True))
            offset += len(core)
            marks.append(Mark(offset, part, False))

        # A longer text has further parts, or another end.
        if text[offset:] != self.end:
            return None
        return marks


class SpanFinder:
    """Finds the turns in one template's renderings. Remembers what it learns about the texts between messages."""

    def __init__(self, write: Write, tags: re.Pattern[str] | None = None) -> None:
        """`tags`: what counts as a tag, as `tag_pattern` returns it."""
        self._write = write
        self._tags = tags or tag_pattern()
        self._layouts: dict[Shape, _Layout] = {}
        # (which end of which turn, the text at that end, white space in it) -> how much of the text is prompt, or end.
        self._frames: dict[tuple[str, str, str], int] = {}

    def locate(
        self,
        text: str,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
    ) -> Rendering:
        """Find the texts of a conversation in its rendering. Raise HiddenText if marks change what is written."""
        tools = list(tools or ())
        has_calls = bool(tools) or any(message.get("tool_calls") for message in messages)
        ways_to_mark = [True]
        # Marks in calls come first: with them the places of calls are known too.
        if has_calls:
            # Some templates compare calls with tools: marks would change what they write.
            ways_to_mark.append(False)
        for mark_calls in ways_to_mark:
            conversation = mark_texts(messages, tools, calls=mark_calls)
            shape = tuple((part.message, part.kind) for part in conversation.parts)

            # A conversation of a known shape need not be written with marks.
            layout = self._layouts.get(shape)
            if layout is not None:
                known = layout.find(conversation.parts, text)
                if known is not None:
                    return Rendering(text, conversation, known)

            try:
                marked = self._write(conversation.messages, conversation.tools)
            except ValueError:
                continue

            # Marks may change what a template writes: it may compare texts, or cut them to a length.
            plain, marks = read_marks(marked, conversation.parts)
            if plain == text:
                self._keep_layout(shape, text, marks)
                return Rendering(text, conversation, marks)

        raise HiddenText("changes the texts of the conversation, or what it writes depends on them")

    def _keep_layout(
        self,
        shape: Shape,
        text: str,
        marks: Sequence[Mark],
    ) -> None:
        """Keep what is around the parts, so that the next conversation of this shape need not be written twice."""
        # Only if each part is whole, and none is within another.
        steps: list[tuple[str, int]] = []
        end = 0
        for opening, closing in zip(marks[::2], marks[1::2], strict=False):
            if not opening.opens or closing.opens or opening.part != closing.part:
                return
            steps.append((text[end : opening.offset], opening.part))
            end = closing.offset

        if len(marks) % 2:
            return
        if len(self._layouts) >= _MOST_KEPT_LAYOUTS:
            self._layouts.clear()
        self._layouts[shape] = _Layout(steps, text[end:])

    def spans(self, rendering: Rendering, turn: int) -> list[Span]:
        """Return the spans of message `turn`, in order; none if they cannot be determined.

        Mostly it is one. Gemma 4 writes a text before a call after the call's result, so there are two:

            …model⏎[call:f{}<tool_call|><|tool_response>]response:f{3}<tool_response|>[One moment.<turn|>]⏎
        """
        marks = rendering.marks
        pieces: list[list[int]] = []  # numbers of marks, those that follow each other together
        for i, mark in enumerate(marks):
            if rendering.part(mark).message != turn:
                continue
            if pieces and pieces[-1][-1] == i - 1:
                pieces[-1].append(i)
            else:
                pieces.append([i])

        if len(pieces) == 2 and self._is_moved(rendering, pieces):
            return self._spans_of_pieces(rendering, turn, pieces)
        if len(pieces) != 1:
            return []  # not written, or another message is in its middle
        history = rendering.conversation.messages[:turn]
        until = rendering.conversation.messages[: turn + 1]
        begin = self._begin(rendering, history, pieces[0][0])
        end = self._end(rendering, until, pieces[0][-1])
        if begin is None or end is None:
            return []
        return [(begin, end)]

    def _is_moved(self, rendering: Rendering, pieces: Sequence[Sequence[int]]) -> bool:
        """True if a message has its calls before the results of tools, and its text after them."""
        calls, texts = (
            {rendering.part(rendering.marks[i]).kind for i in piece} for piece in pieces
        )
        messages = rendering.conversation.messages
        between = range(pieces[0][-1] + 1, pieces[1][0])
        others = {rendering.part(rendering.marks[i]).message for i in between}
        roles = {messages[number]["role"] for number in others if number >= 0}
        return calls <= {"call", "reasoning"} and texts == {"content"} and roles == {"tool"}

    def _spans_of_pieces(
        self, rendering: Rendering, turn: int, pieces: Sequence[Sequence[int]]
    ) -> list[Span]:
        """Return the spans of the calls of a message and of its text, between which are the results."""
        messages = rendering.conversation.messages
        (calls, texts) = pieces
        # What the template writes of the calls alone tells where they end, and where the text after the results begins.
        bare = [*messages[:turn], {**messages[turn], "content": ""}]
        results = rendering.part(rendering.marks[texts[0] - 1]).message
        between = messages[turn + 1 : results + 1]
        borders = (
            self._begin(rendering, messages[:turn], calls[0]),
            self._end(rendering, bare, calls[-1]),
            self._begin(rendering, [*bare, *between], texts[0]),
            self._end(rendering, messages[: results + 1], texts[-1]),
        )
        if any(border is None for border in borders):
            return []
        first, second, third, fourth = (border or 0 for border in borders)
        return [(first, second), (third, fourth)]

    def _begin(
        self,
        rendering: Rendering,
        history: Sequence[Message],
        first: int,
    ) -> int | None:
        """Return where a turn begins: after the generation prompt. `first`: number of its first mark."""
        opening = rendering.marks[first]
        space = rendering.part(opening).before
        if first == 0:
            gap = rendering.text[: opening.offset]
            header = gap.removesuffix(space)
            return self._kept(("first", gap, space), lambda: self._first_header(header))

        before = rendering.marks[first - 1]
        gap = rendering.text[before.offset : opening.offset]
        length = self._kept(
            ("begin", gap, space),
            lambda: self._prompt_length(
                rendering,
                history,
                before,
                gap,
                space,
            ),
        )
        if length is None:
            return None
        return before.offset + length

    def _prompt_length(
        self,
        rendering: Rendering,
        history: Sequence[Message],
        before: Mark,
        gap: str,
        space: str,
    ) -> int | None:
        """Return how much of `gap`, the text between mark `before` and a turn, is the generation prompt.

        `history`: the messages before the turn.
        """
        conversation = rendering.conversation
        written = self._write(history, conversation.tools, generation_prompt=True)
        with_prompt, marks = read_marks(written, conversation.parts)
        # The prompt must follow the same text as the turn does.
        if not marks or marks[-1].part != before.part:
            return None
        prompt = with_prompt[marks[-1].offset :]

        # The usual case: the prompt, and right after it the answer.
        if gap.startswith(prompt):
            return len(prompt)
        gap = gap.removesuffix(space)
        if prompt.startswith(gap):
            # The prompt ends with something that past answers lack, such as DeepSeek-R1's `<think>`.
            return len(gap)
        # The prompt and the gap differ only after some tag.
        shared = _shared_tags(self._tags, gap, prompt, to_last_tag=False)
        if shared:
            return shared

        # The end of the message before depends on what follows. Then only what the prompt adds helps.
        without_prompt, _ = read_marks(self._write(history, conversation.tools))
        added = with_prompt[_same_characters(with_prompt, without_prompt) :]
        for header in (prompt, self._tags.split(prompt)[0], added, self._tags.split(added)[0]):
            if header.strip() and header in gap:
                return gap.rindex(header) + len(header)
        return None

    def _first_header(self, gap: str) -> int:
        """Return how much of `gap`, the text before an answer that comes first of all, is the generation prompt."""
        question = {"role": "user", "content": probe(0)}
        try:
            text, marks = read_marks(self._write([question], None, generation_prompt=True))
        except ValueError:
            return len(gap)

        prompt = ""
        if marks:
            prompt = text[marks[-1].offset :]

        # The prompt also holds the end of the question. Its longest ending that is in the gap counts.
        for start in range(len(prompt)):
            header = prompt[start:]
            if header.strip() and header in gap:
                return gap.rindex(header) + len(header)

        return len(gap)

    def _end(
        self,
        rendering: Rendering,
        until: Sequence[Message],
        last: int,
    ) -> int | None:
        """Return where a turn ends: after the end-of-turn token. `last`: number of its last mark.

        `until`: the messages up to the turn.
        """
        marks = rendering.marks
        closing = marks[last]
        space = rendering.part(closing).after
        if last == len(marks) - 1:
            gap = rendering.text[closing.offset :]
            frame = gap.removeprefix(space)
            length = self._kept(
                ("last", frame, ""),
                lambda: self._end_of_last(
                    rendering,
                    until,
                    closing,
                    frame,
                ),
            )
        else:
            gap = rendering.text[closing.offset : marks[last + 1].offset]
            frame = gap.removeprefix(space)
            length = self._kept(
                ("inner", frame, ""),
                lambda: self._end_of_inner(
                    rendering,
                    until,
                    closing,
                    frame,
                ),
            )

        if length is None:
            return None
        written_space = len(gap) - len(frame)  # the template may have trimmed it
        return closing.offset + written_space + length

    def _end_of_last(
        self,
        rendering: Rendering,
        until: Sequence[Message],
        closing: Mark,
        gap: str,
    ) -> int:
        """Return how much of `gap` ends the last turn: what the template also writes there before another question."""
        conversation = rendering.conversation
        probe_part = len(conversation.parts)
        for role in ("user", "tool"):  # some templates want a tool's result after a call
            question = {"role": role, "content": probe(probe_part)}
            try:
                written = self._write([*until, question], conversation.tools)
            except ValueError:
                continue
            text, marks = read_marks(written, conversation.parts)
            between = _between(text, marks, closing.part, probe_part)
            if between is not None:
                between = between.removeprefix(rendering.part(closing).after)
                return (
                    _shared_tags(self._tags, gap, between)
                    or _leading_tag(self._tags, gap)
                    or _shared_beginning(gap, between)
                )

        # The template refuses a question here, so the last tag counts.
        tags = list(self._tags.finditer(gap))
        if not tags:
            return len(gap)
        return tags[-1].end()

    def _end_of_inner(
        self,
        rendering: Rendering,
        until: Sequence[Message],
        closing: Mark,
        gap: str,
    ) -> int | None:
        """Return how much of `gap` ends a turn: what the turn also ends with if it is the last one."""
        conversation = rendering.conversation
        written = self._write(until, conversation.tools)
        text, marks = read_marks(written, conversation.parts)
        if not marks or marks[-1].part != closing.part:
            return None

        end = text[marks[-1].offset :].removeprefix(rendering.part(closing).after)
        shared = _shared_tags(self._tags, gap, end)
        if shared:
            return shared

        tag = _leading_tag(self._tags, gap)
        # gpt-oss ends a conversation with another token than a turn in its middle.
        if tag and _leading_tag(self._tags, end) and _others_end_with(gap[:tag], rendering):
            return tag
        return _shared_beginning(gap, end)

    def _kept(self, key: tuple[str, str, str], find: Callable[[], int | None]) -> int | None:
        """Return a length that is always the same for the same text between two messages, from memory if it is known."""
        if key in self._frames:
            return self._frames[key]
        length = find()
        if length is not None:
            # Texts between messages repeat, unless a template writes numbers or dates there.
            if len(self._frames) >= _MOST_KEPT_FRAMES:
                self._frames.clear()
            self._frames[key] = length
        return length


def _between(
    text: str,
    marks: Sequence[Mark],
    part: int,
    next_part: int,
) -> str | None:
    """Return the text between a part and the next one, None if they do not follow each other."""
    for before, after in pairwise(marks):
        if after.part == next_part:
            if before.part != part:
                return None
            return text[before.offset : after.offset]

    return None


def _others_end_with(end: str, rendering: Rendering) -> bool:
    """True if a message by somebody other than the assistant ends like this too."""
    messages = rendering.conversation.messages
    for mark in rendering.marks:
        number = rendering.part(mark).message
        if mark.opens or number < 0 or messages[number]["role"] == "assistant":
            continue
        if rendering.text.startswith(end, mark.offset):
            return True
    return False


def _shared_tags(
    tags: re.Pattern[str],
    gap: str,
    other: str,
    *,
    to_last_tag: bool = True,
) -> int:
    """Return how much both begin with, in tags and whole texts between tags; 0 if they share no tag.

    With `to_last_tag`, text after the last shared tag, such as a line break, does not count.
    """
    shared: list[str] = []
    # Every second piece is a tag.
    for piece, other_piece in zip(tags.split(gap), tags.split(other), strict=False):
        if piece != other_piece:
            break
        shared.append(piece)

    up_to_tag = len(shared) // 2 * 2
    if to_last_tag or not up_to_tag:
        shared = shared[:up_to_tag]
    return sum(map(len, shared))


def _leading_tag(tags: re.Pattern[str], gap: str) -> int:
    """Return the length up to the end of the first tag if only white space is before it, else 0."""
    match = tags.search(gap)
    if match is None or gap[: match.start()].strip():
        return 0
    return match.end()


def _shared_beginning(gap: str, other: str) -> int:
    """Return how much both begin with if that is all of one of them, else how much white space that begins with."""
    same = _same_characters(gap, other)
    if same in (len(gap), len(other)):
        return same
    return len(gap[:same]) - len(gap[:same].lstrip())


def _same_characters(text: str, other: str) -> int:
    """Return how many characters both texts begin with."""
    same = 0
    for character, other_character in zip(text, other, strict=False):
        if character != other_character:
            break
        same += 1
    return same
