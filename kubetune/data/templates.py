"""Chat templates: rendering conversations as transformers does, and finding the assistant's turns in the result.

Templates come with models, so they run in Jinja's sandbox. Tokens are not known here; spans are characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

Message = Mapping[str, Any]
Span = tuple[int, int]

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
_THINKING = re.compile("<think>(.*?)</think>", re.DOTALL)
IMAGE_MARK = "\U000f7e00image\U000f7e01"
"""Stands for an image in the content of a message whose `IMAGE_TEXTS` say what is written in its place."""
IMAGE_TEXTS = "_image_texts"
"""Key of a message: for each mark in it, what a template that lays images out itself writes, and what it becomes."""
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


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
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    """A template with the options, filters and functions that transformers gives to chat templates."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _now
    return environment.from_string(source)


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates expect it: no null values, reasoning under the names in use."""
    plain = {key: value for key, value in message.items() if value is not None}
    reasoning = next((plain[key] for key in _REASONING_FIELDS if key in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def reasonings(messages: Sequence[Message]) -> Iterator[str]:
    """The reasoning that messages hold, in a field under any of its names or marked in their contents."""
    for message in messages:
        given = [message.get(key) for key in _REASONING_FIELDS]
        for text in (*given, *_THINKING.findall(message.get("content") or "")):
            if isinstance(text, str) and text.strip():
                yield text.strip()


class ChatTemplate:
    """One chat template with the special tokens it may name.

    Every method raises ValueError when the template refuses the conversation, saying why; the caller knows the row.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], name: str = "the tokenizer's") -> None:
        self.source = source
        self.name = name
        self._special_tokens = dict(special_tokens)
        self._marks_generation = _GENERATION.search(source) is not None
        try:
            self._template = _compile(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from error
        self._knows: dict[str, bool] = {}
        self._wants_parts = False
        self._wants_parts = self._shows_only_parts()
        self.closing = self._find_closing()

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, generation_prompt: bool = False
    ) -> str:
        """The text of a conversation; with `generation_prompt` up to where the assistant's next answer begins."""
        return self._render(messages, tools, generation_prompt)[0]

    def render_answers(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, first: int = 0
    ) -> tuple[str, list[Span]]:
        """The text of a conversation and the spans of the assistant's turns in it, from message `first` on.

        A span holds what the model writes at inference: everything after the generation prompt, up to and with the
        end-of-turn token. Where the template has no `{% generation %}` block, a span is found by rendering the
        conversation up to the turn, and it counts only if that is a prefix of the whole.
        """
        text, spans = self._render(messages, tools)
        if self._marks_generation:
            before = sum(message["role"] == "assistant" for message in messages[:first])
            spans = spans[before:]
        else:
            turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
            spans = [self._find_turn(text, messages, tools, i) for i in turns]
        return text, [self.settle(text, *span) for span in spans]

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, generation_prompt: bool = False
    ) -> tuple[str, list[Span]]:
        images = [image for message in messages for image in message.get(IMAGE_TEXTS, ())]
        in_parts = self._wants_parts or (bool(images) and self._lays_out(images[0][0]))
        try:
            marked = self._template.render(
                messages=[self._laid_out(message, in_parts) for message in messages],
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:
            # A template is a program of somebody else's: whatever it trips over is the row's or the template's fault.
            raise ValueError(f"{self.name} chat template refused the conversation: {error}") from error
        text, spans = _take_marks(marked) if self._marks_generation else (marked, [])
        return _put_images(text, spans, images, is_laid_out=in_parts) if images else (text, spans)

    def _laid_out(self, message: Message, in_parts: bool) -> dict[str, Any]:
        """A message as this template wants it: its content a text, or a list of texts and images."""
        plain = _plain(message)
        has_images = bool(plain.pop(IMAGE_TEXTS, None))
        if not isinstance(plain.get("content"), str) or not (self._wants_parts or (in_parts and has_images)):
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

    def _lays_out(self, token: str) -> bool:
        """Whether the template writes `token` for an image that is a part of a content."""
        if token not in self._knows:
            probe = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": _ANSWER}]}]
            try:
                text = self.render(probe)
            except ValueError:
                text = ""
            self._knows[token] = text.count(token) == 1 and _ANSWER in text and "'type'" not in text
        return self._knows[token]

    def _shows_only_parts(self) -> bool:
        """Whether a content is shown only as a list of parts, as with LLaVA's and Idefics' templates."""
        probe = [{"role": "user", "content": _ANSWER}]
        if self._shows(probe):
            return False
        self._wants_parts = True
        return self._shows(probe)

    def _shows(self, probe: Sequence[Message]) -> bool:
        try:
            return _ANSWER in self.render(probe)
        except ValueError:
            return False

    def _find_turn(self, text: str, messages: Sequence[Message], tools: Sequence[Any] | None, turn: int) -> Span:
        """Where message `turn` was written into `text`, the rendering of all `messages`."""
        start = self._find_start(text, messages, tools, turn)
        end = self._find_end(text, messages, tools, turn)
        if start is None or end is None or end <= start:
            raise ValueError(
                f"the answer in messages[{turn}] cannot be found exactly: {self.name} chat template renders the "
                "conversation differently when it ends there; mark answers with {% generation %} in a template of your "
                "own (`model.chat_template: file.jinja`), or set `data.train_on: all`"
            )
        return start, end

    def _find_start(self, text: str, messages: Sequence[Message], tools: Sequence[Any] | None, turn: int) -> int | None:
        prompt = self.render(messages[:turn], tools, generation_prompt=True) if turn else ""
        if turn and text.startswith(prompt):
            return len(prompt)
        before = self.render(_with_probe(messages, turn), tools).partition(_ANSWER)[0]
        if turn == 0:
            return len(before) if text.startswith(before) else None
        # Only what earlier answers look like may have changed: Qwen3 drops the reasoning of all before the last
        # question. Then this answer begins after the last generation prompt before it.
        header = prompt.removeprefix(self.render(messages[:turn], tools))
        at = before.rfind(header)
        rewritten = any(message["role"] == "assistant" for message in messages[:turn])
        if not rewritten or header in ("", prompt) or at < 0 or not text.startswith(before[: at + len(header)]):
            return None
        return at + len(header)

    def _find_end(self, text: str, messages: Sequence[Message], tools: Sequence[Any] | None, turn: int) -> int | None:
        if turn == len(messages) - 1:
            return len(text)
        head = self.render(messages[: turn + 1], tools)
        if text.startswith(head):
            return len(head)
        # The turn reads differently when it is the last. What follows it does not: put a probe in its place and see
        # what comes after.
        probed = _with_probe(messages, turn)
        _, found, after = self.render(probed, tools).partition(_ANSWER)
        ending = self.render(probed[: turn + 1], tools).partition(_ANSWER)[2]
        rest = after.removeprefix(ending)
        if not found or _ANSWER in rest or rest == after or not rest or not text.endswith(rest):
            return None
        return len(text) - len(rest)

    def _find_closing(self) -> str:
        """What the template writes after an answer, such as `<|im_end|>`; empty when it writes nothing."""
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        try:
            return self.render(chat).partition(_ANSWER)[2].strip()
        except ValueError:
            return ""

    def settle(self, text: str, start: int, end: int) -> Span:
        """Let a span end right after the end-of-turn token: not before it, nor after the line break that follows."""
        if self.closing:
            written = text[start:end].rstrip()
            if written.endswith(self.closing):
                return start, start + len(written)
            if text.startswith(self.closing, end):
                return start, end + len(self.closing)
        return start, end


def _with_probe(messages: Sequence[Message], turn: int) -> list[Message]:
    probe = {key: value for key, value in messages[turn].items() if key not in (*_REASONING_FIELDS, IMAGE_TEXTS)}
    return [*messages[:turn], {**probe, "content": _ANSWER}, *messages[turn + 1 :]]


def _take_marks(marked: str) -> tuple[str, list[Span]]:
    """Remove the marks of generation blocks from a rendering and say which spans they enclosed."""
    parts = _MARK.split(marked)
    borders = [0]
    for part in parts:
        borders.append(borders[-1] + len(part))
    return "".join(parts), [(borders[i], borders[i + 1]) for i in range(1, len(parts) - 1, 2)]


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
    return "".join(part for pair in zip(pieces, [*(t for _, t in images), ""], strict=True) for part in pair), moved
