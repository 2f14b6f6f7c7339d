"""One chat template: write a conversation as text, and find the assistant's turns in it. Tokens are not known here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kubetune.data.text.row_notes import RowNote
from kubetune.data.text.turns.marks import Message, Part, Rendering, mark_texts, not_written
from kubetune.data.text.turns.sandbox import (
    marks_generation,
    take_generation_marks,
    without_generation_marks,
)
from kubetune.data.text.turns.spans import HiddenText, Span, SpanFinder, tag_pattern
from kubetune.data.text.turns.turn_refusals import require_order
from kubetune.data.text.turns.writer import ANSWER, TemplateWriter

# The built-in template that `model.chat_template: chatml` stands for.
CHATML: Final = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- generation %}{{- message.content + '<|im_end|>' if message.role == 'assistant' else '' }}{% endgeneration %}
    {{- '' if message.role == 'assistant' else message.content + '<|im_end|>' }}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

# Characters of white space that may be between a generation prompt and an answer.
_MOST_SPACE: Final = 80


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text, and the trained spans in it."""

    text: str
    spans: list[Span]
    notes: frozenset[RowNote] = frozenset()


class ChatTemplate:
    """One chat template with the special tokens that it may use.

    Every method raises ValueError, with the reason, if the template refuses the conversation. The caller adds the row.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        name: str = "the tokenizer's",
        date: str | None = None,
        tokens: Sequence[str] = (),
    ) -> None:
        """`date`: the day (`2026-11-22`) that the template gets when it asks for today's; by default the real one.

        `tokens`: the tokens of the tokenizer that a template may write around texts.
        """
        self.source = source
        self.name = name
        self._marks_generation = marks_generation(source)
        self._writer = TemplateWriter(source, special_tokens, name, date)
        tags = {token for token in (*tokens, *special_tokens.values()) if len(token.strip()) >= 3}
        self._tags = tag_pattern(tags)
        self._finder = SpanFinder(self._writer.write, self._tags)
        self.closing = self._find_closing()
        # What ends an answer ends a call too, whatever its shape.
        if self.closing and not self._tags.search(self.closing):
            self._tags = tag_pattern({*tags, self.closing})
            self._finder = SpanFinder(self._writer.write, self._tags)
        self._prompt_end = self._find_prompt_end()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        generation_prompt: bool = False,
    ) -> str:
        """Return the text of a conversation; with `generation_prompt`, up to the beginning of the next answer."""
        text = self._writer.write_or_explain(messages, tools, generation_prompt=generation_prompt)
        if self._marks_generation:
            text = without_generation_marks(text)
        text, _ = self._writer.put_images(text, [], messages)
        return text

    def render_answers(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        trained: Collection[int] = (),
    ) -> Rendered:
        """Return the text of a conversation, and the spans of the assistant's messages `trained`.

        A span holds what the model writes at inference: everything after the generation prompt, up to the end-of-turn
        token and with it. If the template itself marks what is generated, its spans are used. Raise ValueError also if
        the template leaves out a message, a tool call or the tools. It may leave out reasoning, as Qwen3's does before
        the last question.
        """
        require_order(self.name, self.source, messages)
        raw = self._writer.write_or_explain(messages, tools)

        # Where the texts of the conversation are. Nobody needs to know if nothing is trained, or if the template marks it.
        try:
            rendering = self._finder.locate(raw, messages, tools)
            absent = rendering.missing()
        except HiddenText as error:
            if trained and not self._marks_generation:
                raise self._cannot_find(next(iter(trained)), str(error)) from error
            rendering = Rendering(raw, mark_texts(messages, tools or ()), [])
            absent = not_written(rendering.conversation, raw)

        for part in absent:
            if part.kind != "reasoning":
                raise ValueError(
                    f"{self._leaves_out(part, messages)}; choose one that writes it "
                    "(`model.chat_template: file.jinja`), or take it out of the data"
                )

        if self._marks_generation:
            text, answers = self._marked_answers(rendering, trained)
        else:
            text = raw
            answers = []
            for turn in trained:
                answers += [(turn, span) for span in self._find_turn(rendering, turn)]

        notes: set[RowNote] = set()
        if absent:
            notes.add("reasoning_dropped")
        if self._is_unlike_prompt(text, answers, messages, tools):
            notes.add("unlike_prompt")
        if not self._marks_generation and len(answers) > len(trained):
            notes.add("text_moved")
        if _rewrites(rendering, trained):
            notes.add("rewrites_answer")
        # Images are put in last: all other offsets are of the text without them.
        text, spans = self._writer.put_images(text, [span for _, span in answers], messages)
        return Rendered(text, spans, frozenset(notes))

    def left_out(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
    ) -> list[str]:
        """Return in words what the template leaves out of the prompt, except reasoning."""
        prompt = self._writer.write_or_explain(messages, tools, generation_prompt=True)
        try:
            text = self._writer.write(messages, tools)
            absent = self._finder.locate(text, messages, tools).missing()
        except ValueError:
            absent = not_written(mark_texts(messages, tools or ()), prompt)

        missing = []
        for part in absent:
            if part.kind != "reasoning":
                missing.append(self._leaves_out(part, messages))
        return missing

    def _find_turn(self, rendering: Rendering, turn: int) -> list[Span]:
        """Return the spans of a turn. Raise ValueError if they cannot be determined."""
        parts = []
        for mark in rendering.marks:
            if mark.opens and rendering.part(mark).message == turn:
                parts.append(mark.part)
        if len(set(parts)) < len(parts):
            raise self._cannot_find(turn, "writes it more than once")
        spans = self._finder.spans(rendering, turn)
        if not spans:
            raise self._cannot_find(turn, "writes the conversation differently when it ends there")
        return spans

    def _marked_answers(
        self,
        rendering: Rendering,
        trained: Collection[int],
    ) -> tuple[str, list[tuple[int, Span]]]:
        """Return a rendering without the marks of its generation blocks, and (turn, span) of each trained block."""
        # Places of texts and of blocks are compared with the marks still in the text.
        generated = take_generation_marks(rendering.text)
        written = {rendering.part(mark).message for mark in rendering.marks}
        if not written.issuperset(trained):
            # Some answers cannot be seen. If there is one block for each answer, they are in the same order.
            messages = rendering.conversation.messages
            turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            if len(turns) != len(generated.spans):
                raise self._cannot_find(
                    next(iter(trained)), "marks other spans than one for each answer"
                )
        elif rendering.marks:
            turns = [_turn_of(block, rendering) for block in generated.marked_spans]
        else:
            turns = []

        # There may be blocks of answers that are not trained.
        answers = []
        for turn, span in zip(turns, generated.spans, strict=False):
            if turn in trained:
                answers.append((turn, self._to_end_of_turn(generated.text, span)))
        return generated.text, answers

    def _is_unlike_prompt(
        self,
        text: str,
        answers: Sequence[tuple[int, Span]],
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
    ) -> bool:
        """True if an answer begins elsewhere than at the end of the generation prompt, which may open a thought."""
        # A template may mark several blocks of a turn. The turn begins at the first.
        beginnings: dict[int, int] = {}
        for turn, (start, _) in answers:
            beginnings.setdefault(turn, start)
        for turn, start in beginnings.items():
            # Mostly the prompt ends in the same way everywhere, and need not be written for each turn.
            if turn == 0 or _is_behind(self._prompt_end, text, start):
                continue
            try:
                prompt = self.render(messages[:turn], tools, generation_prompt=True)
            except ValueError:
                continue  # the template does not ask a model after these messages
            if not _is_behind(self._end_of(prompt), text, start):
                return True

        return False

    def _find_prompt_end(self) -> str:
        """Return how the generation prompt ends after a question; "" if the template refuses a single question."""
        try:
            question = {"role": "user", "content": ANSWER}
            return self._end_of(self.render([question], generation_prompt=True))
        except ValueError:
            return ""

    def _end_of(self, prompt: str) -> str:
        """Return the last tag of a generation prompt with what follows it, or its last word if it has no tag."""
        tags = list(self._tags.finditer(prompt))
        if tags:
            return prompt[tags[-1].start() :].rstrip()
        return "".join(prompt.split()[-1:])

    def _find_closing(self) -> str:
        """Return what the template writes after an answer, such as `<|im_end|>`; "" if that is nothing."""
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
        try:
            text = self._writer.write(messages, None)
            rendering = self._finder.locate(text, messages, None)
            spans = self._finder.spans(rendering, 1)
        except ValueError:
            return ""
        end = spans[-1][1] if spans else len(text)
        behind_answer = text[:end].partition(ANSWER)[2]
        return without_generation_marks(behind_answer).strip()

    def _to_end_of_turn(self, text: str, span: Span) -> Span:
        """Return a span that ends right after the end-of-turn token, as some blocks end before it or a line break later."""
        # text Pong<|im_end|>⏎, closing <|im_end|>: the span ends after Pong, or after the line break.
        start, end = span
        if self.closing:
            written = text[start:end].rstrip()
            if written.endswith(self.closing):
                return start, start + len(written)
            if text.startswith(self.closing, end):
                return start, end + len(self.closing)
        return span

    def _cannot_find(self, turn: int, why: str) -> ValueError:
        return ValueError(
            f"the answer in messages[{turn}] cannot be found exactly: {self.name} chat template {why}; mark answers "
            "with {% generation %} in a template of your own (`model.chat_template: file.jinja`), or set "
            "`data.train_on: all`"
        )

    def _leaves_out(self, part: Part, messages: Sequence[Message]) -> str:
        """Return in words that the template leaves out a part."""
        brief = part.text
        if len(brief) > 40:
            brief = brief[:39] + "…"
        if part.kind == "tool":
            what = f"the tools ({brief!r})"
        elif part.kind == "call":
            what = f"a tool call in messages[{part.message}] ({brief!r})"
        else:
            role = messages[part.message]["role"]
            what = f"the content of messages[{part.message}], by the {role} ({brief!r})"

        return f"{self.name} chat template leaves out {what}"


def _is_behind(end: str, text: str, start: int) -> bool:
    """True if this end of a prompt is right before an answer that begins at `start`, or begins the answer."""
    reach = len(end) + _MOST_SPACE
    before = text[max(0, start - reach) : start]
    after = text[start : start + reach]
    return before.rstrip().endswith(end) or after.lstrip().startswith(end)


def _rewrites(rendering: Rendering, trained: Collection[int]) -> bool:
    """True if a trained content is different in the rendering from what it is in its message."""
    begins: dict[int, int] = {}
    for mark in rendering.marks:
        part = rendering.part(mark)
        if part.kind != "content" or part.message not in trained:
            continue
        if mark.opens:
            begins[mark.part] = mark.offset
            continue
        begin = begins.get(mark.part, mark.offset)
        if rendering.text[begin : mark.offset] != part.text:
            return True

    return False


def _turn_of(block: Span, rendering: Rendering) -> int:
    """Return the turn whose text begins in a block or, if none does, is right before it.

    A block without a text only ends a turn.
    """
    begin, end = block
    marks = rendering.marks
    first = bisect_left(marks, begin, key=lambda mark: mark.offset)
    for mark in marks[first:]:
        if mark.offset >= end:
            break
        if mark.opens:
            return rendering.part(mark).message

    return rendering.part(marks[max(first - 1, 0)]).message
