"""Write conversations by one chat template, in the form that it needs.

Templates differ in what they take: contents as texts or as lists of parts, tool calls with their arguments as objects
or as JSON text. Each form is tried once with a small conversation, and the first one is used whose text is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

import jinja2
from jinja2.runtime import Context

from kubetune.data.column_names import REASONING
from kubetune.data.reading.strict_json import JsonObject
from kubetune.data.text.turns.marks import IMAGE_MARK, Message
from kubetune.data.text.turns.sandbox import compile_template, to_json
from kubetune.data.text.turns.spans import Span
from kubetune.data.text.turns.turn_refusals import Refusal, explained, words_of

# A text for trying a template. It is in no data set.
ANSWER: Final = "\U000f7e00answer\U000f7e01"
# Key of a message. For each image in it: (what a template that writes images itself writes, what that becomes).
IMAGE_TEXTS: Final = "_image_texts"


class _CallsForm(NamedTuple):
    """The form in which a template shows tool calls."""

    # An empty content beside calls is null.
    null_content: bool = False
    # Arguments are JSON text, as OpenAI has them.
    text_arguments: bool = False


# A small conversation with one call, whose argument is the text that is looked for.
_TOOL: Final = {"type": "function", "function": {"name": "f", "description": "?", "parameters": {}}}
_CALL: Final = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "f", "arguments": {"a": ANSWER}},
}
_CALLING: Final[list[Message]] = [
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
]


class TemplateWriter:
    """Writes conversations by one chat template. Making one raises ValueError if the template is no valid Jinja."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        name: str,
        date: str | None,
    ) -> None:
        self._name = name
        try:
            self._template = compile_template(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from error

        # What transformers gives to templates, so that ours are written as there.
        self._variables = {
            **self._template.globals,
            "documents": None,
            **special_tokens,
        }
        if date is not None:
            self._variables["strftime_now"] = datetime.fromisoformat(date).strftime

        # What was found out about the template. The form of calls is tried when the first call comes.
        self._calls_form: _CallsForm | None = None
        # Text for an image -> whether the template writes it by itself.
        self._lays_out_images: dict[str, bool] = {}
        self._wants_parts = False  # `_shows_only_parts` writes with it
        self._wants_parts = self._shows_only_parts()

    def write(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        *,
        generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """Return the text, still with the marks of generation blocks and images. Raise Refusal."""
        if self._calls_form is None and any(message.get("tool_calls") for message in messages):
            self._calls_form = self._find_calls_form()

        in_parts = self._in_parts(messages)
        template = self._template
        try:
            variables = self._variables | {
                "messages": [self._lay_out(message, in_parts) for message in messages],
                "tools": list(tools) if tools else None,
                "add_generation_prompt": generation_prompt,
                **variables,
            }
            # `Template.render` gathers the globals anew each time, which takes longer than most templates.
            context = Context(
                template.environment,
                variables,
                None,
                template.blocks,
            )
            return "".join(template.root_render_func(context))
        except MemoryError:
            raise
        except Exception as error:
            # Whatever a template raises is the record's fault, or its own.
            raise Refusal(self._name, words_of(error, template)) from error

    def write_or_explain(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        *,
        generation_prompt: bool = False,
    ) -> str:
        """Do what `write` does, but raise a ValueError that names the part that the template does not take."""
        try:
            return self.write(messages, tools, generation_prompt=generation_prompt)
        except Refusal as refusal:
            raise explained(refusal, self.write, messages, tools) from refusal

    def put_images(
        self,
        text: str,
        spans: list[Span],
        messages: Sequence[Message],
    ) -> tuple[str, list[Span]]:
        """Replace each image's placeholder by what it becomes, and move the spans. Raise ValueError if images are missing.

        Example: `<image>` becomes 3 tokens' texts `<i><i><i>`, 2 characters more, so spans after it move by 2.
        """
        images = _images_of(messages)
        if not images:
            return text, spans
        written, _ = images[0]
        placeholder = IMAGE_MARK
        if self._in_parts(messages):
            placeholder = written
        pieces = text.split(placeholder)
        if len(pieces) != len(images) + 1:
            raise ValueError(
                f"has {len(images)} images, but the chat template writes {written!r} {len(pieces) - 1} times: it "
                "leaves images out, or a text holds that itself"
            )

        # Text by text and image by image, with a note of how far all after has moved.
        result = pieces[0]
        # (offset in `text` after an image, by how much the text has grown up to there)
        shifts = [(0, 0)]
        offset = len(result)
        for piece, (_, becomes) in zip(pieces[1:], images, strict=True):
            result += becomes + piece
            offset += len(placeholder)
            _, grown_before = shifts[-1]
            shifts.append((offset, grown_before + len(becomes) - len(placeholder)))
            offset += len(piece)

        moved = []
        for start, stop in spans:
            moved.append((start + _shift_at(start, shifts), stop + _shift_at(stop, shifts)))
        return result, moved

    def _in_parts(self, messages: Sequence[Message]) -> bool:
        """True if contents are given to the template as lists of parts."""
        if self._wants_parts:
            return True
        images = _images_of(messages)
        if not images:
            return False
        written, _ = images[0]
        return self._lays_out(written)

    def _lay_out(self, message: Message, in_parts: bool) -> JsonObject:
        """Return a message as this template needs it: its content a text, or a list of texts and images."""
        plain = _plain(message)
        calls = plain.get("tool_calls")
        if calls:
            self._lay_out_calls(plain, calls)
        has_images = bool(plain.pop(IMAGE_TEXTS, None))
        content = plain.get("content")
        if isinstance(content, str) and (self._wants_parts or (in_parts and has_images)):
            plain["content"] = _in_parts_of(content)
        return plain

    def _lay_out_calls(self, message: JsonObject, calls: Sequence[Any]) -> None:
        """Put tool calls, and the content beside them, into a message as this template needs them."""
        form = self._calls_form or _CallsForm()
        message["tool_calls"] = list(calls)
        if form.text_arguments:
            message["tool_calls"] = [_with_text_arguments(call) for call in calls]
        if not message["content"] and form.null_content:
            message["content"] = None

    def _find_calls_form(self) -> _CallsForm:
        """Return the first form in which the template writes the arguments of a call."""
        for text_arguments in (False, True):
            for null_content in (False, True):
                self._calls_form = _CallsForm(null_content, text_arguments)
                if ANSWER in self._try(_CALLING, [_TOOL]):
                    return self._calls_form

        return _CallsForm()

    def _lays_out(self, written: str) -> bool:
        """True if the template writes `written` for an image that is a part of a content."""
        if written not in self._lays_out_images:
            parts = [{"type": "image"}, {"type": "text", "text": ANSWER}]
            text = self._try([{"role": "user", "content": parts}])
            self._lays_out_images[written] = text.count(written) == 1 and _shows_answer(text)
        return self._lays_out_images[written]

    def _shows_only_parts(self) -> bool:
        """True if a content has to be a list of parts, as for LLaVA's and Idefics' templates.

        For some of Gemma's, only the system's content has to be.
        """
        question = [{"role": "user", "content": ANSWER}]
        system = [{"role": "system", "content": ANSWER}, {"role": "user", "content": "?"}]
        # As texts; only if one of them is not written, as parts.
        shows_question = self._shows(question)
        if shows_question and self._shows(system):
            return False
        self._wants_parts = True
        return self._shows(question) and (not shows_question or self._shows(system))

    def _shows(self, messages: Sequence[Message]) -> bool:
        return _shows_answer(self._try(messages))

    def _try(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> str:
        """Return what the template writes, "" if it refuses."""
        try:
            return self.write(messages, tools)
        except ValueError:
            return ""


def _shows_answer(text: str) -> bool:
    """True if a content was written as a text, and not as Python prints a list of parts."""
    return ANSWER in text and "'type'" not in text


def _plain(message: Message) -> JsonObject:
    """Return a message as templates expect it: no null values, reasoning under the names in use."""
    plain = {key: value for key, value in message.items() if value is not None}
    for key in REASONING:
        if key in plain:
            return {
                "thinking": plain[key],
                **plain,
                "reasoning_content": plain[key],
            }
    return plain


def _with_text_arguments(call: Mapping[str, Any]) -> JsonObject:
    function = call["function"]
    return {**call, "function": {**function, "arguments": to_json(function["arguments"])}}


def _in_parts_of(content: str) -> list[dict[str, str]]:
    """Return a content as a list of texts and images."""
    parts: list[dict[str, str]] = []
    pieces = content.split(IMAGE_MARK)
    for number, piece in enumerate(pieces):
        # The template writes the line break between an image and its question itself.
        if number > 0:
            parts.append({"type": "image"})
            piece = piece.removeprefix("\n")
        if number < len(pieces) - 1:
            piece = piece.removesuffix("\n")
        if piece or len(pieces) == 1:
            parts.append({"type": "text", "text": piece})

    return parts


def _images_of(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Return for each image of a conversation (what is written for it, what that becomes)."""
    images: list[tuple[str, str]] = []
    for message in messages:
        images += message.get(IMAGE_TEXTS, ())
    return images


def _shift_at(offset: int, shifts: Sequence[tuple[int, int]]) -> int:
    """Return by how much an offset in a text moves: as the last image before it says."""
    moves_by = 0
    for behind_image, grown in shifts:
        if behind_image <= offset:
            moves_by = grown
    return moves_by
