"""From examples to ids and labels: which token is trained.

Two rules hold everything together. A conversation has the ids that transformers gives to the whole of it. And the ids
before an answer are those that `Tokenizer.encode_prompt` gives; where a token lies across that border they cannot be,
and the row says so. docs/data.md says which token is then trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import tokenizers
from tokenizers import Encoding, models, normalizers, pre_tokenizers

from kubetune.data.reading.formats import Chat, Example, Pair, Text
from kubetune.data.text.bpe_cache import Words
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.data.text.turns.spans import Span
from kubetune.data.text.turns.template import Rendered

if TYPE_CHECKING:
    from kubetune.data.vision.image_processor import ImageRef

TrainOn = Literal["assistant", "all"]

SEEING: Final = "set `task: vision_language`"
"""Advice for records with images."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One row: `ids`, and for each of them whether it is a label. The first never is: nothing predicts it.

    Of a labelled text no token is a label; it has a `target` and token types (`segments`) instead. Of a pair, the
    second sequence begins at `split`; 0 where there is one sequence only.
    """

    ids: list[int]
    trained: list[bool]
    target: tuple[float, ...] = ()
    segments: list[int] = field(default_factory=list)
    drops_reasoning: bool = False
    """The chat template left reasoning out, as Qwen3's does before the last question."""
    unlike_prompt: bool = False
    """An answer that is trained begins elsewhere than where the generation prompt ends, which may open a thought."""
    rewrites_answer: bool = False
    """The chat template writes a trained answer otherwise than the data have it."""
    begins_inside_token: bool = False
    """The prompt of a trained answer has other ids when it stands alone: a token lies across its end."""
    images: tuple[ImageRef, ...] = ()
    """In the order of their tokens."""
    image_notes: tuple[str, ...] = ()
    """Notes on them that are to be counted, as `image_processor.Seen` has them."""
    split: int = 0

    @property
    def labels(self) -> int:
        """Number of its labels: of its tokens, or the one that it has itself."""
        return sum(self.trained) or (1 if self.segments else 0)

    @property
    def longest(self) -> int:
        """Tokens of its longest sequence."""
        return max(self.split, len(self.ids) - self.split)

    @property
    def sequences(self) -> tuple[tuple[list[int], list[bool]], ...]:
        """Ids of each sequence, and whether they are labels."""
        if not self.split:
            return ((self.ids, self.trained),)
        parts = slice(0, self.split), slice(self.split, None)
        return tuple((self.ids[part], self.trained[part]) for part in parts)


class Placed(NamedTuple):
    """A rendering as ids, and the tokens of its trained spans."""

    ids: list[int]
    runs: list[tuple[int, int]]  # of each span its first token, and the one behind its last
    begins_inside_token: bool = False  # as in Encoded


class Encoder:
    """Examples to rows, with one tokenizer and one choice of what is trained."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        train_on: TrainOn = "assistant",
        add_special_tokens: bool = True,
        keeps_prompts: bool = False,
    ) -> None:
        """`keeps_prompts`: no token of a conversation may lie across the border of an answer, whose prompt is shared.

        So a conversation with such a token is encoded in pieces, and its ids are not those of the whole.
        """
        self.tokenizer = tokenizer
        self._keeps_prompts = keeps_prompts
        self._all = train_on == "all"
        self._prefix = tokenizer.prefix if add_special_tokens else []
        self._anchor = self._find_anchor()
        self._words = None if self._anchor[1] else Words.of(tokenizer.backend)
        self._looks_ahead = _looks_ahead(tokenizer.backend)
        self._ids_alone = lru_cache(maxsize=1024)(partial(tokenizer.encode_text, special=False))

    @property
    def trains_all(self) -> bool:
        """Every token is a label, whoever speaks."""
        return self._all

    def without_prefix(self) -> Encoder:
        """The same for texts that hold all of their special tokens themselves."""
        bare = copy(self)
        bare._prefix = []
        return bare

    def encode(self, example: Example) -> Encoded:
        """One row. Raises ValueError when the chat template refuses the conversation or hides where answers are."""
        (row,) = self.encode_batch([example])
        if isinstance(row, str):
            raise ValueError(row)
        return row

    def encode_batch(self, examples: Sequence[Example]) -> list[Encoded | str]:
        """Rows of many examples; in the place of one that is refused stands why."""
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
        rendered: dict[int, Rendered] = {}
        for i, found in zip(chats, self._render(list(chats.values())), strict=True):
            if isinstance(found, ValueError):
                results[i] = str(found)
            else:
                rendered[i] = found
        for i, row in zip(rendered, self._encode_chats(list(rendered.values())), strict=True):
            results[i] = row
        return results

    def cut(self, _: Example, encoded: Encoded, limit: int) -> Encoded:
        """The first `limit` tokens of a row."""
        return replace(encoded, ids=encoded.ids[:limit], trained=encoded.trained[:limit])

    def _require_usable(self, chat: Chat) -> None:
        """Raise ValueError for a conversation with what this run cannot do."""
        if chat.images:
            raise ValueError(f"has images, which a language model cannot see; {SEEING}")
        if self._all and chat.not_trained:
            raise ValueError(
                f"messages[{min(chat.not_trained)}] says that it is not to be trained, and `data.train_on` is all; "
                "set that to assistant, or leave the other out of the message"
            )

    def _render(self, chats: Sequence[Chat]) -> list[Rendered | ValueError]:
        """Conversations as texts with the spans to be trained; an error where the template refuses one."""
        if not chats:
            return []
        trained = [[] if self._all else trained_messages(chat) for chat in chats]
        template = self.tokenizer.require_chat()
        found = template.render_all(
            [(chat.messages, chat.tools, turns) for chat, turns in zip(chats, trained, strict=True)]
        )
        if not self._all:
            return found
        return [
            replace(r, spans=[(0, len(r.text))]) if isinstance(r, Rendered) else r for r in found
        ]

    def _encode_chats(self, chats: Sequence[Rendered]) -> list[Encoded]:
        """Return the rows of rendered conversations, of which only what the spans enclose is trained."""
        placed = [self._place_by_words(chat.text, chat.spans) for chat in chats]
        remaining = [i for i, row in enumerate(placed) if row is None]
        encodings = self.tokenizer.backend.encode_batch(
            [chats[i].text for i in remaining], add_special_tokens=False
        )
        for i, encoding in zip(remaining, encodings, strict=True):
            placed[i] = self._place_by_offsets(chats[i].text, chats[i].spans, encoding)
        return [
            self._mark(chat, row)
            for chat, row in zip(chats, placed, strict=True)
            if row is not None
        ]

    def _mark(self, chat: Rendered, placed: Placed) -> Encoded:
        """Return the row of a conversation, of which the tokens of the spans are trained."""
        ids = placed.ids
        trained = [False] * len(ids)
        ends_turn = self.tokenizer.eos_ids
        for first, end in placed.runs:
            # Some models, such as GLM-4, end a turn with the token that begins the next.
            end += end < len(ids) and ids[end] in ends_turn and ids[end - 1] not in ends_turn
            trained[first:end] = [True] * (end - first)
        if trained and trained[-1] and not self._is_ended(chat.text, ids):
            ids = [*ids, self.tokenizer.eos_id]
            trained.append(True)
        if trained:
            trained[0] = False
        return Encoded(
            ids,
            trained,
            drops_reasoning=chat.drops_reasoning,
            unlike_prompt=chat.unlike_prompt,
            rewrites_answer=chat.rewrites_answer,
            begins_inside_token=placed.begins_inside_token,
        )

    def _is_ended(self, text: str, ids: list[int]) -> bool:
        """The rendering ends with what ends a turn; a line break may stand behind it."""
        closing = self.tokenizer.require_chat().closing
        return ids[-1] in self.tokenizer.eos_ids or (
            self._all and bool(closing) and text.rstrip().endswith(closing)
        )

    def _place_by_words(self, text: str, spans: list[Span]) -> Placed | None:
        """Return the ids of a text and the tokens of its spans; None where that takes the tokenizer itself."""
        if self._words is None:
            return None
        cut = self._words.cut_ids(text, sorted({*chain.from_iterable(spans)}))
        if cut is None:
            return None
        ids, tokens = cut
        return Placed(ids, [(tokens[start], tokens[stop]) for start, stop in spans])

    def _place_by_offsets(self, text: str, spans: list[Span], encoding: Encoding) -> Placed:
        """Return the ids of a whole text, and the tokens that hold characters of its spans.

        Example: an answer that begins with a line break, in the middle of a token, and ends with a tag that takes the
        space behind it (`rstrip`). Both are trained.

            text      <|assistant|> \\n [\\n P o n g <|end|>] \\n <|user|>       [ ] is the span
            tokens    <|assistant|>  \\n\\n   Pong  <|end|>\\n    <|user|>
            trained                  x        x     x
        """
        begins_inside = False
        runs: list[tuple[int, int]] = []
        for start, stop in spans:
            first = _token_at(encoding, start, len(text))
            if _begins_before(encoding, first, start):
                if self._own_span(text, encoding, first)[1] <= start:
                    first += 1  # a tag of the prompt, which takes the space behind it
                else:
                    begins_inside = True
            if self._looks_ahead:
                begins_inside |= self._differs_alone(text[:start], encoding, first)
            end = _token_at(encoding, stop, len(text))
            if _begins_before(encoding, end, stop):
                end += self._own_span(text, encoding, end)[0] < stop
            runs.append((first, end))
        if begins_inside and self._keeps_prompts:
            return self._place_by_pieces(text, spans)
        return Placed(encoding.ids, runs, begins_inside)

    def _differs_alone(self, prompt: str, encoding: Encoding, first: int) -> bool:
        """True if a prompt has other ids alone than it has in a text, whose encoding goes on with token `first`.

        Nothing before the last added token matters to what follows, and prompts mostly end alike from there on.
        """
        added = self.tokenizer.added_tokens
        token = first - 1
        while token > 0 and encoding.ids[token] not in added:
            token -= 1
        begin = 0
        if token > 0:
            begin, _ = self._own_span(prompt, encoding, token)
        token = max(token, 0)
        return self._ids_alone(prompt[begin:]) != encoding.ids[token:first]

    def _own_span(self, text: str, encoding: Encoding, token: int) -> Span:
        """Return the place of a token in a text, without the space that an added token takes (`lstrip`, `rstrip`)."""
        begin, end = encoding.token_to_chars(token) or (0, 0)
        content = self.tokenizer.added_tokens.get(encoding.ids[token])
        own = text.find(content, begin, end) if content else -1
        if content is None or own < 0:
            return begin, end
        return own, own + len(content)

    def _place_by_pieces(self, text: str, spans: list[Span]) -> Placed:
        """Return the ids of a text that is encoded up to each border of a span and on from there."""
        ids: list[int] = []
        tokens: dict[int, int] = {}
        borders = sorted({0, len(text), *chain.from_iterable(spans)})
        for begin, end in pairwise(borders):
            tokens[begin] = len(ids)
            ids += self._continue(text[begin:end], after_something=begin > 0)
        tokens[len(text)] = len(ids)
        return Placed(ids, [(tokens[start], tokens[stop]) for start, stop in spans])

    def _encode_plain(self, example: Example) -> Encoded:
        if not isinstance(example, Pair | Text):
            raise ValueError(
                "is a labelled text; set `task: sequence_classification`, or `data.format: text`"
            )
        eos = self.tokenizer.eos_id
        if isinstance(example, Text):
            before, after = self._prefix, self._continue(example.text, after_something=False)
        else:
            prompt, after = self._encode_pair(example)
            before = [*self._prefix, *prompt]
        ids = [*before, *after, *([] if after and after[-1] == eos else [eos])]
        trained = [self._all] * len(before) + [True] * (len(ids) - len(before))
        if isinstance(example, Text):
            trained = [True] * len(ids)
        trained[0] = False
        return Encoded(ids, trained)

    def _encode_pair(self, pair: Pair) -> tuple[list[int], list[int]]:
        """Return the ids of a prompt, as a model is asked, and of its completion, as they go on in the whole text.

        Where a token of the whole lies across the border, the completion is encoded by itself.
        """
        text = pair.prompt + pair.completion
        spans = [(len(pair.prompt), len(text))]
        placed = self._place_by_words(text, spans)
        if placed is None:
            encoding = self.tokenizer.backend.encode(text, add_special_tokens=False)
            placed = self._place_by_offsets(text, spans, encoding)
        if placed.begins_inside_token:
            before = self._continue(pair.prompt, after_something=False)
            after_something = bool(self._prefix or before)
            return before, self._continue(pair.completion, after_something=after_something)
        first, _ = placed.runs[0]
        return placed.ids[:first], placed.ids[first:]

    def _continue(self, text: str, *, after_something: bool) -> list[int]:
        """Ids of a text that begins a row or goes on from something before it."""
        if self._words is not None:
            return self._words.ids(text)
        anchor, tokens = self._anchor if after_something else ("", 0)
        return self.tokenizer.backend.encode(anchor + text, add_special_tokens=False).ids[tokens:]

    def _find_anchor(self) -> tuple[str, int]:
        """Text that must stand before a continuation, and its number of tokens; mostly nothing.

        SentencePiece tokenizers begin every text with a space, which a completion of " World" or "World" must not
        get twice or at all. After a line break they do not.
        """
        alone, after, anchor = (
            self.tokenizer.encode_text(text, special=False) for text in ("a", "\na", "\n")
        )
        plain = after[: len(anchor)] != anchor or after[len(anchor) :] == alone
        return ("", 0) if plain else ("\n", len(anchor))


def pieces(document: Encoded, limit: int) -> list[Encoded]:
    """Rows of at most `limit` tokens that train each token of a document once."""
    parts = split_at(len(document.ids), limit)
    return [
        replace(document, ids=document.ids[p], trained=[False, *document.trained[p][1:]])
        for p in parts
    ]


def split_at(length: int, limit: int) -> list[slice]:
    """Places in a document of the rows that it is split into.

    Each begins with the token that the one before ended with, by which its first own one is predicted.
    """
    return [
        slice(start, min(start + limit, length))
        for start in range(0, max(1, length - 1), limit - 1)
    ]


def trained_messages(chat: Chat) -> list[int]:
    """Numbers of the trained messages: the assistant's that are not context, but for those that the data leave out."""
    answers = (i for i, message in enumerate(chat.messages) if message["role"] == "assistant")
    return [i for i in answers if i >= chat.context and i not in chat.not_trained]


def _looks_ahead(backend: tokenizers.Tokenizer) -> bool:
    """True if the ids of a text may change with what follows it, though no token lies across its end.

    Patterns look at what follows white space, and an added token may have to be a whole word. Plain BPE merges what is
    within a text in one way, whatever follows.
    """
    if any(token.single_word for token in backend.get_added_tokens_decoder().values()):
        return True
    if not isinstance(backend.model, models.BPE):
        return True
    if not isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace | None):
        return True
    normalizer = backend.normalizer
    steps: list[object] = [normalizer]
    if isinstance(normalizer, normalizers.Sequence):
        steps = [normalizer[i] for i in range(len(normalizer))]
    local = normalizers.Prepend | normalizers.Replace | None
    return not all(isinstance(step, local) for step in steps)


def _token_at(encoding: Encoding, border: int, length: int) -> int:
    """Return the index of the first token that holds a character at or behind a border."""
    for position in range(border, length):
        token = encoding.char_to_token(position)
        if token is not None:
            return token
    return len(encoding.ids)


def _begins_before(encoding: Encoding, token: int, border: int) -> bool:
    """True if a token begins before a border, so that it lies across it."""
    chars = encoding.token_to_chars(token) if token < len(encoding.ids) else None
    return chars is not None and chars[0] < border
