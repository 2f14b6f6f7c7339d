"""Chat templates: rendering conversations as transformers does, and finding the assistant's turns in the result.

Templates come with models, so they run in Jinja's sandbox. Tokens are not known here; spans are characters.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from jinja2.runtime import Context

from kubetune.data.text.marks import (
    IMAGE_MARK,
    REASONING_FIELDS,
    Marked,
    Message,
    Part,
    Place,
    mark,
    missing,
)
from kubetune.data.text.refusals import Refusal, explained, require_order, words_of
from kubetune.data.text.turns import TAGS, HiddenText, Span, Turns

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- generation %}{{- message.content + '<|im_end|>' if message.role == 'assistant' else '' }}{% endgeneration %}
    {{- '' if message.role == 'assistant' else message.content + '<|im_end|>' }}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
"""The built-in template that `model.chat_template: chatml` stands for."""

# Strings no data set holds: the first two enclose what a template marks as generated, the third stands for an answer.
_OPEN, _CLOSE, _ANSWER = (f"\U000f7e00{name}\U000f7e01" for name in ("open", "close", "answer"))
_MARK = re.compile(f"{_OPEN}|{_CLOSE}")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_OF_DICTIONARIES = frozenset(dir(dict))
IMAGE_TEXTS = "_image_texts"
"""Key of a message: for each mark in it, what a template that lays images out itself writes, and what it becomes."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` encloses its output in marks, which rendering turns into spans."""

    tags = {"generation"}  # noqa: RUF012 - the name and type are Jinja's

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        output = caller()
        return f"{_OPEN}{output}{_CLOSE}" if output else ""


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def writes_date(source: str) -> bool:
    """A chat template may write today's date, as gpt-oss' does."""
    return "strftime_now" in source


def _now(form: str) -> str:
    return datetime.now().strftime(form)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    def getattr(self, obj: Any, attribute: str) -> Any:
        """As Jinja's own, only that `message.role` fails to be an attribute of a dictionary without an exception."""
        if type(obj) is dict and attribute in obj and attribute not in _OF_DICTIONARIES:
            return obj[attribute]
        return super().getattr(obj, attribute)


@lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    """A template with the options, filters and functions that transformers gives to chat templates."""
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _now
    return environment.from_string(source)


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates expect it: no null values, reasoning under the names in use."""
    plain = {key: value for key, value in message.items() if value is not None}
    if plain.keys().isdisjoint(REASONING_FIELDS):
        return plain
    reasoning = next(plain[key] for key in REASONING_FIELDS if key in plain)
    return {"thinking": reasoning, **plain, "reasoning_content": reasoning}


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text, where in it is what is trained, and whether the template left reasoning out.

    `unlike_prompt`: something trained begins elsewhere than a model begins that is asked. `rewrites_answer`: the text of
    a trained answer is written otherwise than the data have it.
    """

    text: str
    spans: list[Span]
    drops_reasoning: bool = False
    unlike_prompt: bool = False
    rewrites_answer: bool = False


class ChatTemplate:
    """One chat template with the special tokens it may name.

    Every method raises ValueError when the template refuses the conversation, saying why; the caller knows the row.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        name: str = "the tokenizer's",
        date: str | None = None,
    ) -> None:
        """`date`: the day (`2026-11-22`) that a template is told which asks for today's; left out: today."""
        self.source = source
        self.name = name
        self._variables: dict[str, Any] = dict(special_tokens)
        if date is not None:
            self._variables["strftime_now"] = datetime.fromisoformat(date).strftime
        self._marks_generation = _GENERATION.search(source) is not None
        try:
            self._template = _compile(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from error
        self._variables = {**self._template.globals, "documents": None, **self._variables}
        self._knows: dict[str, bool] = {}
        self._turns = Turns(self._write)
        self._calls_form: tuple[bool, bool] | None = None
        self._wants_parts = False
        self._wants_parts = self._shows_only_parts()
        self.closing = self._find_closing()
        self._prompt_end = self._find_prompt_end()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        generation_prompt: bool = False,
    ) -> str:
        """The text of a conversation; with `generation_prompt` up to where the assistant's next answer begins."""
        raw = self._written(messages, tools, generation_prompt=generation_prompt)
        return self._with_images(
            _take_marks(raw)[0] if self._marks_generation else raw, [], messages
        )[0]

    def render_answers(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        trained: Collection[int] = (),
    ) -> Rendered:
        """The text of a conversation, and where in it the messages `trained` are, which the assistant speaks.

        A span holds what the model writes at inference: everything after the generation prompt, up to and with the
        end-of-turn token. Where the template marks what is generated, the spans are those. Raises ValueError also when
        the template leaves out a message, a tool call or the tools; reasoning it may leave out, as Qwen3's does before
        the last question.
        """
        require_order(self.name, self.source, messages)
        raw = self._written(messages, tools)
        try:
            marked, places = self._turns.locate(raw, messages, tools)
        except HiddenText as error:
            if trained and not self._marks_generation:
                raise ValueError(self._cannot_find(next(iter(trained)), str(error))) from error
            marked, places = mark(messages, tools or ()), []
            absent = [part for part in (*marked.parts, *marked.unmarked) if part.text not in raw]
        else:
            absent = list(missing(marked, places, raw))
        for part in absent:
            if part.kind != "reasoning":
                raise ValueError(self._leaves_out(part, messages))
        if self._marks_generation:
            text, found = self._generated(raw, marked, places, trained)
        else:
            text, found = (
                raw,
                [(turn, self._find_turn(raw, marked, places, turn)) for turn in trained],
            )
        begins = {turn: start for turn, (start, _) in reversed(found)}
        unlike = any(
            self._is_unlike_prompt(text, start, messages[:turn], tools)
            for turn, start in begins.items()
        )
        return Rendered(
            *self._with_images(text, [span for _, span in found], messages),
            bool(absent),
            unlike,
            _rewrites(raw, marked, places, trained),
        )

    def left_out(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> list[str]:
        """Parts of a conversation, but for reasoning, that the template hides from a model that is to go on from it."""
        prompt = self._written(messages, tools, generation_prompt=True)
        try:
            raw = self._write(messages, tools)
            marked, places = self._turns.locate(raw, messages, tools)
            absent = list(missing(marked, places, raw))
        except ValueError:
            marked = mark(messages, tools or ())
            absent = [part for part in (*marked.parts, *marked.unmarked) if part.text not in prompt]
        return [self._lacks(part, messages) for part in absent if part.kind != "reasoning"]

    def _find_turn(self, text: str, marked: Marked, places: Sequence[Place], turn: int) -> Span:
        opened = [place.part for place in places if place.opens]
        written = [part for part in opened if marked.parts[part].message == turn]
        if len(set(written)) < len(written):
            raise ValueError(self._cannot_find(turn, "writes it more than once"))
        span = self._turns.span(text, marked, places, turn)
        if span is None:
            raise ValueError(
                self._cannot_find(turn, "writes the conversation differently when it ends there")
            )
        return span

    def _generated(
        self, raw: str, marked: Marked, places: Sequence[Place], trained: Collection[int]
    ) -> tuple[str, list[tuple[int, Span]]]:
        """A rendering without the marks of its generation blocks, and the spans that are trained, with their turns."""
        text, spans, marks = _take_marks(raw)
        if {marked.parts[place.part].message for place in places}.issuperset(trained):
            turns = [_turn_of(*pair, marked, places) for pair in marks] if places else []
        else:
            turns = [
                i for i, message in enumerate(marked.messages) if message["role"] == "assistant"
            ]
            if len(turns) != len(spans):
                raise ValueError(
                    self._cannot_find(
                        next(iter(trained)), "marks other spans than one for each answer"
                    )
                )
        kept = [(turn, span) for span, turn in zip(spans, turns, strict=False) if turn in trained]
        return text, [(turn, self.settle(text, *span)) for turn, span in kept]

    def _is_unlike_prompt(
        self, text: str, start: int, before: Sequence[Message], tools: Sequence[Any] | None
    ) -> bool:
        """An answer from `start` on does not begin where the generation prompt ends, which may open a thought."""
        if not before or _is_behind(self._prompt_end, text, start):
            return False
        try:
            return not _is_behind(
                _end_of(self.render(before, tools, generation_prompt=True)), text, start
            )
        except ValueError:
            return False  # it is not to be asked after these messages

    def _find_prompt_end(self) -> str:
        try:
            return _end_of(
                self.render([{"role": "user", "content": _ANSWER}], generation_prompt=True)
            )
        except ValueError:
            return ""

    def _cannot_find(self, turn: int, why: str) -> str:
        return (
            f"the answer in messages[{turn}] cannot be found exactly: {self.name} chat template {why}; mark answers "
            "with {% generation %} in a template of your own (`model.chat_template: file.jinja`), or set "
            "`data.train_on: all`"
        )

    def _leaves_out(self, part: Part, messages: Sequence[Message]) -> str:
        return (
            f"{self._lacks(part, messages)}; choose one that writes it (`model.chat_template: file.jinja`), or take "
            "it out of the data"
        )

    def _lacks(self, part: Part, messages: Sequence[Message]) -> str:
        brief = part.text if len(part.text) <= 40 else part.text[:39] + "…"
        if part.kind == "tool":
            what = f"the tools ({brief!r})"
        elif part.kind == "call":
            what = f"a tool call in messages[{part.message}] ({brief!r})"
        else:
            what = f"the content of messages[{part.message}], by the {messages[part.message]['role']} ({brief!r})"
        return f"{self.name} chat template leaves out {what}"

    def _written(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, **more: Any
    ) -> str:
        """As `_write`, with errors that name what the template does not take."""
        try:
            return self._write(messages, tools, **more)
        except Refusal as refusal:
            raise explained(refusal, self._write, messages, tools) from refusal

    def _write(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        *,
        generation_prompt: bool = False,
        **more: Any,
    ) -> str:
        """Text as the template writes it, with the marks of generation blocks and images still in it."""
        in_parts = self._in_parts(messages)
        if self._calls_form is None and any(message.get("tool_calls") for message in messages):
            self._calls_form = self._find_calls_form()
        try:
            variables = self._variables | {
                "messages": [self._laid_out(message, in_parts) for message in messages],
                "tools": list(tools) if tools else None,
                "add_generation_prompt": generation_prompt,
                **more,
            }
            # As `Template.render`, which gathers the globals anew each time: that takes longer than most templates.
            template = self._template
            return "".join(
                template.root_render_func(
                    Context(template.environment, variables, None, template.blocks)
                )
            )
        except MemoryError:
            raise
        except Exception as error:
            # A template is a program of somebody else's: whatever it trips over is the row's or the template's fault.
            raise Refusal(self.name, words_of(error, self._template)) from error

    def _in_parts(self, messages: Sequence[Message]) -> bool:
        image = next(
            (image for message in messages for image in message.get(IMAGE_TEXTS, ())), None
        )
        return self._wants_parts or (image is not None and self._lays_out(image[0]))

    def _with_images(
        self, text: str, spans: list[Span], messages: Sequence[Message]
    ) -> tuple[str, list[Span]]:
        images = [image for message in messages for image in message.get(IMAGE_TEXTS, ())]
        return (
            _put_images(text, spans, images, is_laid_out=self._in_parts(messages))
            if images
            else (text, spans)
        )

    def _laid_out(self, message: Message, in_parts: bool) -> dict[str, Any]:
        """A message as this template wants it: its content a text, or a list of texts and images."""
        plain = _plain(message)
        if calls := plain.get("tool_calls"):
            plain |= self._calls_laid_out(plain["content"], calls)
        has_images = bool(plain.pop(IMAGE_TEXTS, None))
        if not isinstance(plain.get("content"), str) or not (
            self._wants_parts or (in_parts and has_images)
        ):
            return plain
        parts: list[dict[str, str]] = []
        pieces = plain["content"].split(IMAGE_MARK)
        for number, piece in enumerate(pieces):
            # The line break between an image and its question is the template's to write.
            piece = piece.removeprefix("\n") if number else piece
            piece = piece.removesuffix("\n") if number < len(pieces) - 1 else piece
            parts += [{"type": "text", "text": piece}] if piece or len(pieces) == 1 else []
            parts += [{"type": "image"}] if number < len(pieces) - 1 else []
        return {**plain, "content": parts}

    def _calls_laid_out(self, content: str, calls: Sequence[Any]) -> dict[str, Any]:
        """Tool calls, and the content beside them, as this template wants them."""
        null_content, text_arguments = self._calls_form or (False, False)
        if text_arguments:
            functions = [
                {**c["function"], "arguments": _to_json(c["function"]["arguments"])} for c in calls
            ]
            calls = [
                {**call, "function": function}
                for call, function in zip(calls, functions, strict=True)
            ]
        return {
            "tool_calls": list(calls),
            "content": content if content or not null_content else None,
        }

    def _find_calls_form(self) -> tuple[bool, bool]:
        """Needs of calls to be shown: a content that is null beside them, and arguments as text (OpenAI's form)."""
        function = {"name": "f", "arguments": {"a": _ANSWER}}
        call = {"id": "abcdefghi", "type": "function", "function": function}
        tool = {"type": "function", "function": {"name": "f", "description": "?", "parameters": {}}}
        probe: list[Message] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        for form in ((False, False), (True, False), (False, True), (True, True)):
            self._calls_form = form
            try:
                text = self._write(probe, [tool])
            except ValueError:
                continue
            if _ANSWER in text:
                return form
        return False, False

    def _lays_out(self, token: str) -> bool:
        """The template writes `token` for an image that is a part of a content."""
        if token not in self._knows:
            probe = [
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": _ANSWER}]}
            ]
            try:
                text = self._write(probe, None)
            except ValueError:
                text = ""
            self._knows[token] = text.count(token) == 1 and _ANSWER in text and "'type'" not in text
        return self._knows[token]

    def _shows_only_parts(self) -> bool:
        """A content is shown only as a list of parts, as with LLaVA's and Idefics' templates, or a system's with some
        of Gemma's."""
        user = [{"role": "user", "content": _ANSWER}]
        system = [{"role": "system", "content": _ANSWER}, {"role": "user", "content": "?"}]
        if (is_shown := self._shows(user)) and self._shows(system):
            return False
        self._wants_parts = True
        return self._shows(user) and (not is_shown or self._shows(system))

    def _shows(self, probe: Sequence[Message]) -> bool:
        try:
            rendered = self._write(probe, None)
            return (
                _ANSWER in rendered and "'type'" not in rendered
            )  # of a list that is written as Python would
        except ValueError:
            return False

    def _find_closing(self) -> str:
        """Text that the template writes after an answer, such as `<|im_end|>`; empty when it writes nothing."""
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        try:
            raw = self._write(chat, None)
            marked, places = self._turns.locate(raw, chat, None)
            _, end = self._turns.span(raw, marked, places, 1) or (0, len(raw))
        except ValueError:
            return ""
        return _MARK.sub("", raw[:end].partition(_ANSWER)[2]).strip()

    def settle(self, text: str, start: int, end: int) -> Span:
        """Let a span end right after the end-of-turn token: not before it, nor after the line break that follows."""
        if self.closing:
            written = text[start:end].rstrip()
            if written.endswith(self.closing):
                return start, start + len(written)
            if text.startswith(self.closing, end):
                return start, end + len(self.closing)
        return start, end


def _end_of(prompt: str) -> str:
    """Last tag of a generation prompt with what follows it, or where it has none the last word."""
    tags = list(TAGS.finditer(prompt))
    return prompt[tags[-1].start() :].rstrip() if tags else "".join(prompt.split()[-1:])


def _is_behind(end: str, text: str, start: int) -> bool:
    """An answer that begins at `start` has this end of a prompt before it, or itself begins with it."""
    reach = len(end) + 80  # white space may stand between
    before, after = text[max(0, start - reach) : start], text[start : start + reach]
    return before.rstrip().endswith(end) or after.lstrip().startswith(end)


def _rewrites(text: str, marked: Marked, places: Sequence[Place], trained: Collection[int]) -> bool:
    """True if the content of a trained message stands otherwise in a rendering than in the message."""
    begins: dict[int, int] = {}
    for place in places:
        part = marked.parts[place.part]
        if part.kind != "content" or part.message not in trained:
            continue
        if place.opens:
            begins[place.part] = place.offset
        elif text[begins.get(place.part, place.offset) : place.offset] != part.text:
            return True
    return False


def _turn_of(begin: int, end: int, marked: Marked, places: Sequence[Place]) -> int:
    """Turn whose text stands in a span or, where none begins in it, right before it: such a span only ends a turn."""
    first = bisect_left(places, begin, key=lambda place: place.offset)
    opened = (place for place in places[first:] if place.opens)
    inside = next((place for place in opened if place.offset < end), None)
    return marked.parts[(inside or places[max(first - 1, 0)]).part].message


def _take_marks(marked: str) -> tuple[str, list[Span], list[Span]]:
    """Remove the marks of generation blocks: the rendering, the spans, and where these stood among the marks."""
    parts = _MARK.split(marked)
    offsets = [0]
    for part in parts:
        offsets.append(offsets[-1] + len(part))
    spans = [(offsets[i], offsets[i + 1]) for i in range(1, len(parts) - 1, 2)]
    among = [match.start() for match in _MARK.finditer(marked)]
    return "".join(parts), spans, list(zip(among[::2], among[1::2], strict=False))


def _put_images(
    text: str, spans: Sequence[Span], images: Sequence[tuple[str, str]], *, is_laid_out: bool
) -> tuple[str, list[Span]]:
    """A rendering with what each image becomes in its place, and the spans where they are then."""
    token = images[0][0]
    pieces = text.split(token if is_laid_out else IMAGE_MARK)
    if len(pieces) != len(images) + 1:
        raise ValueError(
            f"has {len(images)} images, but the chat template writes {len(pieces) - 1} of {token!r} for them: it "
            "leaves images out, or the text holds that itself"
        )
    width = len(token if is_laid_out else IMAGE_MARK)
    ends, at = [], 0  # where each stood for has ended, before
    for piece in pieces[:-1]:
        at += len(piece) + width
        ends.append(at)
    longer = [len(becomes) - width for _, becomes in images]
    moved = [
        (start + sum(m for end, m in zip(ends, longer, strict=True) if end <= start),
         stop + sum(m for end, m in zip(ends, longer, strict=True) if end <= stop))
        for start, stop in spans
    ]  # fmt: skip
    return "".join(
        part for pair in zip(pieces, [*(t for _, t in images), ""], strict=True) for part in pair
    ), moved
