"""Turn examples into rows: ids, and which of them are labels.

The package `turns` renders conversations and finds the answers in them. Plain texts, and pairs of a prompt and its
completion, are encoded here:

    text "a b"             ids  BOS a b EOS      trained  0 1 1 1
    prompt "a", then "b"   ids  BOS a b EOS      trained  0 0 1 1
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Protocol

from kubetune.data.reading.examples import Chat, Example, Pair, Text
from kubetune.data.reading.images import ImageRef
from kubetune.data.text.row_notes import RowNote
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.data.text.turns.template import Rendered
from kubetune.data.text.turns.tokens import Placed, TokenFinder

TrainOn = Literal["assistant", "all"]

# Advice for records with images.
SEEING: Final = "set `task: vision_language`"


@dataclass(frozen=True, slots=True)
class Encoded:
    """One row: one sequence of ids, or the two of a pair one after the other."""

    ids: list[int]
    # Of each id, True for a label. The first never is one, since nothing predicts it.
    trained: list[bool]
    # The label of a labelled text or a judged answer, or the margin of a pair.
    target: tuple[float, ...] = ()
    # Token types of a labelled text, which has no labels among its tokens.
    segments: list[int] = field(default_factory=list)
    # What to count about it once.
    notes: frozenset[RowNote] = frozenset()
    # In the order of their tokens.
    images: tuple[ImageRef, ...] = ()
    # What to count about each of them, as `image_processor.Seen` has it.
    image_notes: tuple[RowNote, ...] = ()
    # Where the second sequence of a pair begins; 0 for one sequence.
    split: int = 0

    @property
    def labels(self) -> int:
        """Number of labels: trained tokens, or 1 for a labelled text."""
        if self.segments:
            return 1
        return sum(self.trained)

    @property
    def longest(self) -> int:
        """Tokens of its longest sequence."""
        return max(self.split, len(self.ids) - self.split)

    @property
    def sequences(self) -> tuple[tuple[list[int], list[bool]], ...]:
        """The ids of each sequence, and which of them are labels."""
        if not self.split:
            return ((self.ids, self.trained),)
        first = self.ids[: self.split], self.trained[: self.split]
        second = self.ids[self.split :], self.trained[self.split :]
        return first, second


class RowEncoder(Protocol):
    """The interface of all encoders, which turn examples into rows."""

    def encode_batch(self, examples: Sequence[Example]) -> list[Encoded | str]:
        """Return rows of many examples; in place of one that is refused, the reason."""

    def cut(
        self,
        example: Example,
        encoded: Encoded,
        limit: int,
        /,
    ) -> Encoded:
        """Return the first `limit` tokens of a row."""


class Encoder:
    """Turns examples into rows, with one tokenizer and one choice of what is trained."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        train_on: TrainOn = "assistant",
        add_special_tokens: bool = True,
        keeps_prompts: bool = False,
    ) -> None:
        """`keeps_prompts`: no token may lie across the beginning of an answer, because other rows share its prompt."""
        self.tokenizer = tokenizer
        # Every token is a label, whoever speaks.
        self.trains_all = train_on == "all"
        self._prefix = tokenizer.prefix if add_special_tokens else []
        self._tokens = TokenFinder(tokenizer, keeps_prompts=keeps_prompts)

    def without_prefix(self) -> Encoder:
        """Return an encoder for texts that already hold all of their special tokens."""
        bare = copy(self)
        bare._prefix = []
        return bare

    def encode(self, example: Example) -> Encoded:
        """Return one row. Raise ValueError if the example is refused."""
        (row,) = self.encode_batch([example])
        if isinstance(row, str):
            raise ValueError(row)
        return row

    def encode_batch(self, examples: Sequence[Example]) -> list[Encoded | str]:
        """Return rows of many examples; in place of one that is refused, the reason."""
        # Refused ones keep their place, so that results are in the order of the examples.
        results: list[Encoded | str] = [""] * len(examples)
        chats: dict[int, Chat] = {}
        for i, example in enumerate(examples):
            try:
                if isinstance(example, Chat):
                    self._require_usable(example)
                    chats[i] = example
                else:
                    results[i] = self._encode_plain(example)
            except ValueError as error:
                results[i] = str(error)

        # Templates run in another process, and tokenizers on all cores: both want many conversations at once.
        rendered: dict[int, Rendered] = {}
        renderings = self._render(list(chats.values()))
        for i, rendering in zip(chats, renderings, strict=True):
            if isinstance(rendering, ValueError):
                results[i] = str(rendering)
            else:
                rendered[i] = rendering

        texts = [(chat.text, chat.spans) for chat in rendered.values()]
        placed = self._tokens.place_all(texts)
        for i, row in zip(rendered, placed, strict=True):
            results[i] = self._label(rendered[i], row)
        return results

    def cut(
        self,
        _: Example,
        encoded: Encoded,
        limit: int,
    ) -> Encoded:
        """Return the first `limit` tokens of a row."""
        return replace(encoded, ids=encoded.ids[:limit], trained=encoded.trained[:limit])

    def _require_usable(self, chat: Chat) -> None:
        """Raise ValueError for a conversation with what this run cannot do."""
        if chat.images:
            raise ValueError(f"has images, which a language model cannot see; {SEEING}")
        if self.trains_all and chat.not_trained:
            raise ValueError(
                f"messages[{min(chat.not_trained)}] says that it is not to be trained, and `data.train_on` is all; "
                "set that to assistant, or leave the other out of the message"
            )

    def _render(self, chats: Sequence[Chat]) -> list[Rendered | ValueError]:
        """Return conversations as texts with the spans to be trained, or the error of a template that refuses one."""
        if not chats:
            return []
        template = self.tokenizer.require_chat()
        requests = []
        for chat in chats:
            trained: list[int] = []
            if not self.trains_all:
                trained = trained_messages(chat)
            requests.append((chat.messages, chat.tools, trained))

        rendered = template.render_all(requests)
        if self.trains_all:  # the whole text is one span
            for i, rendering in enumerate(rendered):
                if isinstance(rendering, Rendered):
                    rendered[i] = replace(rendering, spans=[(0, len(rendering.text))])

        return rendered

    def _label(self, chat: Rendered, placed: Placed) -> Encoded:
        """Return the row of a conversation. The tokens of the spans are trained."""
        ids = placed.ids
        trained = [False] * len(ids)
        ends_turn = self.tokenizer.eos_ids
        closing = self.tokenizer.require_chat().closing
        notes = chat.notes
        for first, end in placed.runs:
            # Some models, such as GLM-4, end a turn with the token that begins the next.
            if end < len(ids) and ids[end] in ends_turn and ids[end - 1] not in ends_turn:
                end += 1
            trained[first:end] = [True] * (end - first)
            if not closing and end < len(ids) and ids[end - 1] not in ends_turn:
                notes |= {"open_answers"}

        # A model that never sees an end of a turn would never stop.
        if trained and trained[-1] and not self._is_ended(chat.text, ids):
            ids = [*ids, self.tokenizer.eos_id]
            trained.append(True)
        if trained:
            trained[0] = False  # nothing predicts it

        if placed.begins_inside_token:
            notes |= {"begins_inside_token"}
        return Encoded(ids, trained, notes=notes)

    def _is_ended(self, text: str, ids: list[int]) -> bool:
        """True if a rendering ends with what ends a turn; a line break may follow that."""
        if ids[-1] in self.tokenizer.eos_ids:
            return True
        closing = self.tokenizer.require_chat().closing
        return self.trains_all and bool(closing) and text.rstrip().endswith(closing)

    def _encode_plain(self, example: Example) -> Encoded:
        if isinstance(example, Text):
            before = self._prefix
            after = self._tokens.encode(example.text)
        elif isinstance(example, Pair):
            prompt, after = self._encode_pair(example)
            before = [*self._prefix, *prompt]
        else:
            raise ValueError(
                "is a labelled text; set `task: sequence_classification`, or `data.train.format: text`"
            )

        eos = self.tokenizer.eos_id
        if not after or after[-1] != eos:
            after = [*after, eos]
        # BOS of a text counts as trained too, but it comes first, which nothing predicts.
        trains_before = self.trains_all or isinstance(example, Text)
        trained = [trains_before] * len(before) + [True] * len(after)
        trained[0] = False
        notes: frozenset[RowNote] = frozenset()
        if isinstance(example, Pair) and not before:
            notes = frozenset(("first_not_trained",))
        return Encoded([*before, *after], trained, notes=notes)

    def _encode_pair(self, pair: Pair) -> tuple[list[int], list[int]]:
        """Return the ids of a prompt, as a model is asked with them, and of its completion.

        The text is tokenised whole. If a token would cross the border, prompt and completion are tokenised separately.
        """
        text = pair.prompt + pair.completion
        placed = self._tokens.place(text, [(len(pair.prompt), len(text))])
        if placed.begins_inside_token:
            before = self._tokens.encode(pair.prompt)
            after_something = bool(self._prefix or before)
            return before, self._tokens.encode(pair.completion, after_something=after_something)

        first, _ = placed.runs[0]
        return placed.ids[:first], placed.ids[first:]


def pieces(document: Encoded, limit: int) -> list[Encoded]:
    """Return rows of at most `limit` tokens that train each token of a document once.

    Example: 1 2 3 4 5 with the limit 3 becomes 1 2 3 and 3 4 5, of which 2 3 and 4 5 are trained.
    """
    rows = []
    for part in split_at(len(document.ids), limit):
        # The row before has trained this row's first token as its last one.
        trained = [False, *document.trained[part][1:]]
        rows.append(replace(document, ids=document.ids[part], trained=trained))
    return rows


def split_at(length: int, limit: int) -> list[slice]:
    """Return the slices of a document that become rows.

    Each begins with the last token of the one before, which predicts the first token that it trains.
    """
    starts = range(0, max(1, length - 1), limit - 1)
    return [slice(start, min(start + limit, length)) for start in starts]


def trained_messages(chat: Chat) -> list[int]:
    """Return which messages are trained: the assistant's, without context and those that the data exclude."""
    numbers = []
    for i, message in enumerate(chat.messages):
        if message["role"] == "assistant" and i >= chat.context and i not in chat.not_trained:
            numbers.append(i)
    return numbers
