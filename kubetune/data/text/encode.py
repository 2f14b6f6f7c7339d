"""From examples to ids and labels: which token is trained.

The rule that holds everything together: what stands before a label is tokenised as it will be at inference, so the
ids before an answer equal those of `Tokenizer.encode_prompt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Final, Literal

from tokenizers import Encoding

from kubetune.data.reading.formats import Chat, Example, Pair, Text
from kubetune.data.text.bpe_cache import Words
from kubetune.data.text.templates import Rendered
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.data.text.turns import Span

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


class Encoder:
    """Examples to rows, with one tokenizer and one choice of what is trained."""

    def __init__(
        self, tokenizer: Tokenizer, *, train_on: TrainOn = "assistant", add_special_tokens: bool = True
    ) -> None:
        self.tokenizer = tokenizer
        self._all = train_on == "all"
        self._prefix = tokenizer.prefix if add_special_tokens else []
        self._anchor = self._find_anchor()
        self._words = None if self._anchor[1] else Words.of(tokenizer.backend)

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
        return [replace(r, spans=[(0, len(r.text))]) if isinstance(r, Rendered) else r for r in found]

    def _encode_chats(self, chats: Sequence[Rendered]) -> list[Encoded]:
        """Rows of rendered conversations, of which only what the spans enclose is trained."""
        if self._words is not None:
            return [self._mark(chat, *self._encode_pieces(chat.text, chat.spans)) for chat in chats]
        encodings = self.tokenizer.backend.encode_batch([chat.text for chat in chats], add_special_tokens=False)
        return [
            self._mark(chat, *self._encode_whole(chat.text, chat.spans, encoding))
            for chat, encoding in zip(chats, encodings, strict=True)
        ]

    def _mark(self, chat: Rendered, ids: list[int], starts: dict[int, int]) -> Encoded:
        """A row of which the spans are trained; `starts` says at which token each of their boundaries lies."""
        trained = [False] * len(ids)
        ends_turn = self.tokenizer.eos_ids
        for start, stop in chat.spans:
            first, end = starts[start], starts[stop]
            # Some models, such as GLM-4, end a turn with the token that begins the next.
            end += end < len(ids) and ids[end] in ends_turn and ids[end - 1] not in ends_turn
            trained[first:end] = [True] * (end - first)
        if trained and trained[-1] and not self._is_ended(chat.text, ids):
            ids = [*ids, self.tokenizer.eos_id]
            trained.append(True)
        if trained:
            trained[0] = False
        return Encoded(ids, trained, drops_reasoning=chat.drops_reasoning, unlike_prompt=chat.unlike_prompt)

    def _is_ended(self, text: str, ids: list[int]) -> bool:
        """The rendering ends with what ends a turn; a line break may stand behind it."""
        closing = self.tokenizer.require_chat().closing
        return ids[-1] in self.tokenizer.eos_ids or (self._all and bool(closing) and text.rstrip().endswith(closing))

    def _encode_whole(self, text: str, spans: list[Span], encoding: Encoding) -> tuple[list[int], dict[int, int]]:
        """The ids of a text and the token at each boundary of a span, from its encoding where no token crosses one."""
        starts = {boundary: _token_at(encoding, boundary, len(text)) for span in spans for boundary in span}
        return self._encode_pieces(text, spans) if -1 in starts.values() else (encoding.ids, starts)

    def _encode_pieces(self, text: str, spans: list[Span]) -> tuple[list[int], dict[int, int]]:
        """Ids of a text tokenised up to each boundary of a span and on from there, and the token at each boundary.

        At inference the prompt ends there, so no token may stretch over it.
        """
        ids: list[int] = []
        starts: dict[int, int] = {}
        boundaries = sorted({0, len(text), *chain.from_iterable(spans)})
        for begin, end in pairwise(boundaries):
            starts[begin] = len(ids)
            ids += self._continue(text[begin:end], after_something=begin > 0)
        starts[len(text)] = len(ids)
        return ids, starts

    def _encode_plain(self, example: Example) -> Encoded:
        if not isinstance(example, Pair | Text):
            raise ValueError("is a labelled text; set `task: sequence_classification`, or `data.format: text`")
        eos = self.tokenizer.eos_id
        if isinstance(example, Text):
            before, after = self._prefix, self._continue(example.text, after_something=False)
        else:
            before = [*self._prefix, *self._continue(example.prompt, after_something=False)]
            after = self._continue(example.completion, after_something=bool(before))
        ids = [*before, *after, *([] if after and after[-1] == eos else [eos])]
        trained = [self._all] * len(before) + [True] * (len(ids) - len(before))
        if isinstance(example, Text):
            trained = [True] * len(ids)
        trained[0] = False
        return Encoded(ids, trained)

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
        alone, after, anchor = (self.tokenizer.encode_text(text, special=False) for text in ("a", "\na", "\n"))
        plain = after[: len(anchor)] != anchor or after[len(anchor) :] == alone
        return ("", 0) if plain else ("\n", len(anchor))


def pieces(document: Encoded, limit: int) -> list[Encoded]:
    """Rows of at most `limit` tokens that train each token of a document once."""
    parts = split_at(len(document.ids), limit)
    return [replace(document, ids=document.ids[p], trained=[False, *document.trained[p][1:]]) for p in parts]


def split_at(length: int, limit: int) -> list[slice]:
    """Places in a document of the rows that it is split into.

    Each begins with the token that the one before ended with, by which its first own one is predicted.
    """
    return [slice(start, min(start + limit, length)) for start in range(0, max(1, length - 1), limit - 1)]


def trained_messages(chat: Chat) -> list[int]:
    """Numbers of the trained messages: the assistant's that are not context, but for those that the data leave out."""
    answers = (i for i, message in enumerate(chat.messages) if message["role"] == "assistant")
    return [i for i in answers if i >= chat.context and i not in chat.not_trained]


def _token_at(encoding: Encoding, boundary: int, length: int) -> int:
    """The index of the first token at or after a character; -1 where a token stretches over it."""
    for position in range(boundary, length):
        token = encoding.char_to_token(position)
        if token is not None:
            start, _ = encoding.token_to_chars(token) or (0, 0)
            return token if start >= boundary else -1
    return len(encoding.ids)
