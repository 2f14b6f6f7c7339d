"""Conversations written by one chat template, in the form that it wants them in.

Templates differ in what they take: contents as texts or as lists of parts, tool calls with their arguments as objects
or as JSON text. Each is tried once with a small conversation, and the form is taken in which a text comes out again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

import jinja2
from jinja2.runtime import Context

from kubetune.data.text.turns.marks import IMAGE_MARK, REASONING_FIELDS, Message
from kubetune.data.text.turns.refusals import Refusal, explained, words_of
from kubetune.data.text.turns.sandbox import compile_template, to_json
from kubetune.data.text.turns.spans import Span

# Stands for a text where a template is tried. No data set holds it.
ANSWER: Final = "\U000f7e00answer\U000f7e01"
# Key of a message: for each mark in it, what a template that lays images out itself writes, and what it becomes.
IMAGE_TEXTS: Final = "_image_texts"


class _CallsForm(NamedTuple):
    """The form in which a template shows tool calls."""

    null_content: bool = False  # an empty content beside calls is null
    text_arguments: bool = False  # arguments are JSON text, as OpenAI has them


class TemplateWriter:
    """Writes conversations by one chat template. Raises ValueError for a template that is no valid Jinja."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], name: str, date: str | None
    ) -> None:
        self._name = name
        try:
            self._template = compile_template(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from error
        self._variables = {**self._template.globals, "documents": None, **special_tokens}
        if date is not None:
            self._variables["strftime_now"] = datetime.fromisoformat(date).strftime
        self._calls_form: _CallsForm | None = None  # tried when the first call comes
        self._lays_out_images: dict[str, bool] = {}  # by the text that it writes for an image
        self._wants_parts = False
        self._wants_parts = self._shows_only_parts()

    def write(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        *,
        generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """Return the text with the marks of generation blocks and images still in it. Raises Refusal."""
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
            context = Context(template.environment, variables, None, template.blocks)
            return "".join(template.root_render_func(context))
        except MemoryError:
            raise
        except Exception as error:
            # Whatever a template trips over is the record's fault, or its own.
            raise Refusal(self._name, words_of(error, template)) from error

    def write_or_explain(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        *,
        generation_prompt: bool = False,
    ) -> str:
        """Return what `write` does. Raises ValueError that names what the template does not take."""
        try:
            return self.write(messages, tools, generation_prompt=generation_prompt)
        except Refusal as refusal:
            raise explained(refusal, self.write, messages, tools) from refusal

    def put_images(
        self, text: str, spans: list[Span], messages: Sequence[Message]
    ) -> tuple[str, list[Span]]:
        """Put what each image becomes in its place, and move spans along. Raises ValueError where images are missing."""
        images = _images_of(messages)
        if not images:
            return text, spans
        written = images[0][0]
        placeholder = written if self._in_parts(messages) else IMAGE_MARK
        pieces = text.split(placeholder)
        if len(pieces) != len(images) + 1:
            raise ValueError(
                f"has {len(images)} images, but the chat template writes {written!r} {len(pieces) - 1} times: it "
                "leaves images out, or a text holds that itself"
            )
        result = pieces[0]
        shifts = [
            (0, 0)
        ]  # (offset in `text` behind an image, by how much the text has grown there)
        offset = len(result)
        for piece, (_, becomes) in zip(pieces[1:], images, strict=True):
            result += becomes + piece
            offset += len(placeholder)
            grown = shifts[-1][1] + len(becomes) - len(placeholder)
            shifts.append((offset, grown))
            offset += len(piece)
        moved = []
        for start, stop in spans:
            moved.append((start + _shift_at(start, shifts), stop + _shift_at(stop, shifts)))
        return result, moved

    def _in_parts(self, messages: Sequence[Message]) -> bool:
        """Return True if contents go to the template as lists of parts."""
        if self._wants_parts:
            return True
        images = _images_of(messages)
        return bool(images) and self._lays_out(images[0][0])

    def _lay_out(self, message: Message, in_parts: bool) -> dict[str, Any]:
        """Return a message as this template wants it: its content a text, or a list of texts and images."""
        plain = _plain(message)
        calls = plain.get("tool_calls")
        if calls:
            self._lay_out_calls(plain, calls)
        has_images = bool(plain.pop(IMAGE_TEXTS, None))
        content = plain.get("content")
        if isinstance(content, str) and (self._wants_parts or (in_parts and has_images)):
            plain["content"] = _in_parts_of(content)
        return plain

    def _lay_out_calls(self, message: dict[str, Any], calls: Sequence[Any]) -> None:
        """Give a message its tool calls, and the content beside them, as this template wants them."""
        form = self._calls_form or _CallsForm()
        message["tool_calls"] = list(calls)
        if form.text_arguments:
            message["tool_calls"] = [_with_text_arguments(call) for call in calls]
        if not message["content"] and form.null_content:
            message["content"] = None

    def _find_calls_form(self) -> _CallsForm:
        """Return the first form in which the template shows calls."""
        function = {"name": "f", "arguments": {"a": ANSWER}}
        call = {"id": "abcdefghi", "type": "function", "function": function}
        tool = {"type": "function", "function": {"name": "f", "description": "?", "parameters": {}}}
        messages: list[Message] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        for text_arguments in (False, True):
            for null_content in (False, True):
                self._calls_form = _CallsForm(null_content, text_arguments)
                if ANSWER in self._try(messages, [tool]):
                    return self._calls_form
        return _CallsForm()

    def _lays_out(self, written: str) -> bool:
        """Return True if the template writes `written` for an image that is a part of a content."""
        if written not in self._lays_out_images:
            parts = [{"type": "image"}, {"type": "text", "text": ANSWER}]
            text = self._try([{"role": "user", "content": parts}])
            self._lays_out_images[written] = text.count(written) == 1 and _shows_answer(text)
        return self._lays_out_images[written]

    def _shows_only_parts(self) -> bool:
        """Return True if a content has to be a list of parts, as with LLaVA's and Idefics' templates.

        With some of Gemma's only the system's has to be.
        """
        question = [{"role": "user", "content": ANSWER}]
        system = [{"role": "system", "content": ANSWER}, {"role": "user", "content": "?"}]
        shows_question = self._shows(question)
        if shows_question and self._shows(system):
            return False
        self._wants_parts = True
        return self._shows(question) and (not shows_question or self._shows(system))

    def _shows(self, messages: Sequence[Message]) -> bool:
        return _shows_answer(self._try(messages))

    def _try(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> str:
        """Return what the template writes; nothing where it refuses."""
        try:
            return self.write(messages, tools)
        except ValueError:
            return ""


def _shows_answer(text: str) -> bool:
    """Return True if a content came out as it should, and not as Python writes a list of parts."""
    return ANSWER in text and "'type'" not in text


def _plain(message: Message) -> dict[str, Any]:
    """Return a message as templates expect it: no null values, reasoning under the names in use."""
    plain = {key: value for key, value in message.items() if value is not None}
    for key in REASONING_FIELDS:
        if key in plain:
            return {"thinking": plain[key], **plain, "reasoning_content": plain[key]}
    return plain


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": to_json(function["arguments"])}}


def _in_parts_of(content: str) -> list[dict[str, str]]:
    """Return a content as a list of texts and images."""
    parts: list[dict[str, str]] = []
    pieces = content.split(IMAGE_MARK)
    for number, piece in enumerate(pieces):
        # The line break between an image and its question is the template's to write.
        if number > 0:
            parts.append({"type": "image"})
            piece = piece.removeprefix("\n")
        if number < len(pieces) - 1:
            piece = piece.removesuffix("\n")
        if piece or len(pieces) == 1:
            parts.append({"type": "text", "text": piece})
    return parts


def _images_of(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Return what is written for each image of a conversation, and what it becomes."""
    images: list[tuple[str, str]] = []
    for message in messages:
        images += message.get(IMAGE_TEXTS, ())
    return images


def _shift_at(offset: int, shifts: Sequence[tuple[int, int]]) -> int:
    """Return by how much a place in a text moves."""
    return max(shift for shift in shifts if shift[0] <= offset)[1]
