"""The assistant's turns in the rendering of a conversation: from the generation prompt to the end-of-turn token.

Marks (marks.py) say where the texts of a turn stand. How much of what stands between two messages belongs to the turn
before, and how much is what a model is prompted with, is seen by rendering the conversation up to there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, Final, Protocol

from kubetune.data.text.marks import Kind, Marked, Message, Part, Place, mark, probe, read_marks

Span = tuple[int, int]
Shape = tuple[tuple[int, Kind], ...]
Layout = tuple[list[tuple[str, int]], str]
"""Texts before each part of a conversation, and the one after the last."""

TAGS: Final = re.compile(r"(<[^<>\s]+>|\[/?[A-Z_]+\])")
_MOST_FRAMES: Final = 4096
_MOST_LAYOUTS: Final = 256


class Render(Protocol):
    """Writes a conversation as the template does. Raises ValueError where it refuses it."""

    def __call__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        *,
        generation_prompt: bool = False,
    ) -> str: ...


class HiddenText(ValueError):
    """A rendering in which texts are not found as they are given."""


class Turns:
    """The turns in one template's renderings. What frames them is found out once for each form it comes in."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._layouts: dict[Shape, Layout] = {}
        self._frames: dict[tuple[str, bool | str], int] = {}

    def locate(
        self, text: str, messages: Sequence[Message], tools: Sequence[Any] | None
    ) -> tuple[Marked, list[Place]]:
        """The conversation with marks, and where these stand in `text`. Raises HiddenText where they change it."""
        given = list(tools or ())
        for calls in (True, False):
            marked = mark(messages, given, calls=calls)
            shape = tuple((part.message, part.kind) for part in marked.parts)
            if (layout := self._layouts.get(shape)) and (
                known := _places(layout, marked.parts, text)
            ):
                return marked, known
            try:
                found, places = read_marks(
                    self._render(marked.messages, marked.tools), marked.parts
                )
            except ValueError:
                continue
            if found == text:
                self._remember_layout(shape, text, places)
                return marked, places
            if not given and not any(message.get("tool_calls") for message in messages):
                break
        raise HiddenText("changes the texts of the conversation, or what it writes depends on them")

    def _remember_layout(self, shape: Shape, text: str, places: Sequence[Place]) -> None:
        """Keep what stands around the parts: the next conversation of this shape need not be rendered twice."""
        opened, closed = places[::2], places[1::2]
        pairs = list(zip(opened, closed, strict=False))
        if len(places) % 2 or any(not a.opens or b.opens or a.part != b.part for a, b in pairs):
            return
        if len(self._layouts) >= _MOST_LAYOUTS:
            self._layouts.clear()
        ends = [0, *(place.offset for place in closed)]
        steps = [
            (text[end : place.offset], place.part) for end, place in zip(ends, opened, strict=False)
        ]
        self._layouts[shape] = steps, text[ends[-1] :]

    def span(self, text: str, marked: Marked, places: Sequence[Place], turn: int) -> Span | None:
        """Span of `text` that message `turn` was written into; None where that cannot be told."""
        own = [k for k, place in enumerate(places) if marked.parts[place.part].message == turn]
        if not own:
            return None
        first, last = own[0], own[-1]
        if any(marked.parts[place.part].message != turn for place in places[first : last + 1]):
            return None
        begin = self._begin(text, marked, places, turn, first)
        end = self._end(text, marked, places, turn, last)
        return None if begin is None or end is None else (begin, end)

    def _begin(
        self, text: str, marked: Marked, places: Sequence[Place], turn: int, first: int
    ) -> int | None:
        """Beginning of turn `turn`, of which mark `first` is the first: behind the generation prompt."""
        before = places[first - 1] if first else None
        after = before.offset if before else 0
        gap, space = text[after : places[first].offset], marked.parts[places[first].part].before
        find = partial(self._prompt_length, gap, gap.removesuffix(space), marked, before, turn)
        length = self._remembered((gap + "\0" + space, before is None), find)
        return None if length is None else after + length

    def _prompt_length(
        self, whole: str, gap: str, marked: Marked, before: Place | None, turn: int
    ) -> int | None:
        """Length of the generation prompt within what stands before a turn; `gap` lacks the space that its text has."""
        if before is None:
            return self._header_length(gap)
        written = self._render(marked.messages[:turn], marked.tools, generation_prompt=True)
        prompt, places = read_marks(written, marked.parts)
        if not places or places[-1].part != before.part:
            return None
        asked = prompt[places[-1].offset :]
        if whole.startswith(asked):
            return len(asked)
        if asked.startswith(gap):
            return len(
                gap
            )  # the prompt goes on with what history does not hold, such as DeepSeek-R1's `<think>`
        if shared := _shared(gap, asked, to_tag=False):
            return shared
        # What the message before ends with depends on what follows; then only what the prompt adds tells.
        bare = read_marks(self._render(marked.messages[:turn], marked.tools))[0]
        added = prompt[_same(prompt, bare) :]
        headers = (header for form in (asked, added) for header in (form, TAGS.split(form)[0]))
        found = next((header for header in headers if header.strip() and header in gap), "")
        return gap.rindex(found) + len(found) if found else None

    def _header_length(self, gap: str) -> int:
        """Length of the generation prompt within what stands before an answer that nothing precedes."""
        question = {"role": "user", "content": probe(0)}
        try:
            prompt, places = read_marks(self._render([question], None, generation_prompt=True))
        except ValueError:
            return len(gap)
        asked = prompt[places[-1].offset :] if places else ""
        suffixes = (asked[i:] for i in range(len(asked)))
        header = next((suffix for suffix in suffixes if suffix.strip() and suffix in gap), "")
        return gap.rindex(header) + len(header) if header else len(gap)

    def _end(
        self, text: str, marked: Marked, places: Sequence[Place], turn: int, last: int
    ) -> int | None:
        """End of turn `turn`, of which mark `last` is the last: behind the end-of-turn token."""
        is_last = last == len(places) - 1
        place, space = places[last], marked.parts[places[last].part].after
        gap = text[place.offset :] if is_last else text[place.offset : places[last + 1].offset]
        frame = gap.removeprefix(space)
        if is_last:
            find: Callable[[], int | None] = partial(self._end_of_last, frame, marked, place)
        else:
            closes_others = partial(_closes_others, text, marked, places)
            find = partial(self._end_of_inner, frame, marked, place, closes_others)
        length = self._remembered((frame, "last" if is_last else "inner"), find)
        return None if length is None else place.offset + len(gap) - len(frame) + length

    def _end_of_last(self, gap: str, marked: Marked, place: Place) -> int:
        """Length of the last turn's end within what a rendering ends with: what it also writes before a question."""
        turn = marked.parts[place.part].message
        for role in ("user", "tool"):
            follow_up = {"role": role, "content": probe(len(marked.parts))}
            try:
                longer = self._render([*marked.messages[: turn + 1], follow_up], marked.tools)
            except ValueError:
                continue
            text, places = read_marks(longer, marked.parts)
            asked = next(
                (k for k, place in enumerate(places) if place.part == len(marked.parts)), 0
            )
            if asked and places[asked - 1].part == place.part:
                between = text[places[asked - 1].offset : places[asked].offset]
                between = between.removeprefix(marked.parts[place.part].after)
                return _shared(gap, between) or _first_tag(gap) or _shared_space(gap, between)
        tags = [match.end() for match in TAGS.finditer(gap)]
        return tags[-1] if tags else len(gap)

    def _end_of_inner(
        self, gap: str, marked: Marked, place: Place, closes_others: Callable[[str], bool]
    ) -> int | None:
        """Length of the first message's end within what stands between two: what it also ends with as the last."""
        turn = marked.parts[place.part].message
        text, places = read_marks(
            self._render(marked.messages[: turn + 1], marked.tools), marked.parts
        )
        if not places or places[-1].part != place.part:
            return None
        alone = text[places[-1].offset :].removeprefix(marked.parts[place.part].after)
        if shared := _shared(gap, alone):
            return shared
        tag = _first_tag(gap)
        # gpt-oss ends a conversation with another token than a turn in its middle.
        if tag and _first_tag(alone) and closes_others(gap[:tag]):
            return tag
        return _shared_space(gap, alone)

    def _remembered(
        self, frame: tuple[str, bool | str], find: Callable[[], int | None]
    ) -> int | None:
        """Finding for a frame, which is the same for the same text between two messages."""
        if frame in self._frames:
            return self._frames[frame]
        length = find()
        if length is not None:
            if len(self._frames) >= _MOST_FRAMES:
                self._frames.clear()
            self._frames[frame] = length
        return length


def _places(layout: Layout, parts: Sequence[Part], text: str) -> list[Place]:
    """Places of the parts in `text` if it is laid out in this way; none if it is not."""
    steps, rest = layout
    places: list[Place] = []
    at = 0
    for before, part in steps:
        if not text.startswith(before, at):
            return []
        at += len(before)
        core = parts[part].text
        if not text.startswith(core, at):
            return []
        places.append(Place(at, part, True))
        at += len(core)
        places.append(Place(at, part, False))
    return places if text.startswith(rest, at) and at + len(rest) == len(text) else []


def _closes_others(text: str, marked: Marked, places: Sequence[Place], closing: str) -> bool:
    """Messages of others end in the same way."""
    ends = (place for place in places if not place.opens and marked.parts[place.part].message >= 0)
    others = (
        place
        for place in ends
        if marked.messages[marked.parts[place.part].message]["role"] != "assistant"
    )
    return any(text.startswith(closing, place.offset) for place in others)


def _shared(gap: str, other: str, *, to_tag: bool = True) -> int:
    """The length of the tags and whole texts between tags that both begin with; 0 where they share no tag.

    With `to_tag` up to the last tag, so that space behind it does not count.
    """
    pairs = zip(TAGS.split(gap), TAGS.split(other), strict=False)
    equal = [piece for piece, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    tags = len(equal) // 2 * 2
    return sum(map(len, equal[:tags] if to_tag or not tags else equal))


def _first_tag(gap: str) -> int:
    """The length up to the first tag, if only space stands before it; 0 otherwise."""
    match = TAGS.search(gap)
    return match.end() if match and not gap[: match.start()].strip() else 0


def _shared_space(gap: str, other: str) -> int:
    """The length of what both begin with where one of them holds nothing else, or of the space they begin with."""
    if gap.startswith(other):
        return len(other)
    same = _same(gap, other)
    return same if same == len(gap) else len(gap[:same]) - len(gap[:same].lstrip())


def _same(one: str, other: str) -> int:
    """Number of characters that both begin with."""
    differing = (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    return next(differing, min(len(one), len(other)))
