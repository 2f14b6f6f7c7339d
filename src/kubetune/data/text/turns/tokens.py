"""Find the tokens of spans: which ids a text has, and which of its tokens hold characters of its spans.

A conversation has the ids that transformers gives to all of its text. The ids before an answer should be those that a
model is asked with. If a token lies across that border they differ, and the row is counted (`begins_inside_token`).
docs/data.md says which tokens are then trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain, pairwise
from typing import NamedTuple

import tokenizers
from tokenizers import Encoding, models, normalizers, pre_tokenizers

from kubetune.data.text.bpe_cache import Words
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.data.text.turns.spans import Span


class Placed(NamedTuple):
    """A text as ids, and the tokens of its spans."""

    ids: list[int]
    # Of each span its first token, and the one after its last.
    runs: list[tuple[int, int]]
    # The text before a span has other ids when it stands alone.
    begins_inside_token: bool = False


class TokenFinder:
    """Finds the tokens of spans, by one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, *, keeps_prompts: bool) -> None:
        """`keeps_prompts`: the text before a span has the ids that it has alone, because other rows share it.

        Then a text with a token across such a border is encoded in pieces, and has other ids than the whole text.
        """
        self._tokenizer = tokenizer
        self._keeps_prompts = keeps_prompts

        # How words and continuations are encoded.
        self._anchor = ""
        self._anchor_tokens = 0
        self._find_anchor()
        self._words = None
        if not self._anchor_tokens:
            self._words = Words.of(tokenizer.backend)
        # Whether a prompt has to be encoded alone to see if its ids change, and the ids of prompts' ends.
        self._looks_ahead = _looks_ahead(tokenizer.backend)
        self._ids_alone = lru_cache(maxsize=1024)(partial(tokenizer.encode_text, special=False))

    def place(self, text: str, spans: Sequence[Span]) -> Placed:
        """Return the ids of a text and the tokens of its spans."""
        placed = self._place_by_words(text, spans)
        if placed is None:
            encoding = self._tokenizer.backend.encode(text, add_special_tokens=False)
            placed = self._place_by_offsets(text, spans, encoding)
        return placed

    def place_all(self, texts: Sequence[tuple[str, Sequence[Span]]]) -> list[Placed]:
        """Return the ids of texts and the tokens of their spans."""
        placed = {}
        for i, (text, spans) in enumerate(texts):
            by_words = self._place_by_words(text, spans)
            if by_words is not None:
                placed[i] = by_words

        # The tokenizer encodes all others at once, on all cores.
        others = [i for i in range(len(texts)) if i not in placed]
        encodings = self._tokenizer.backend.encode_batch(
            [texts[i][0] for i in others], add_special_tokens=False
        )
        for i, encoding in zip(others, encodings, strict=True):
            placed[i] = self._place_by_offsets(*texts[i], encoding)
        return [placed[i] for i in range(len(texts))]

    def encode(self, text: str, *, after_something: bool = False) -> list[int]:
        """Return the ids of a text that begins a row, or that continues something before it."""
        if self._words is not None:
            return self._words.ids(text)
        if not after_something:
            return self._tokenizer.encode_text(text, special=False)
        # The ids of the anchor come first, and are cut off again.
        ids = self._tokenizer.encode_text(self._anchor + text, special=False)
        return ids[self._anchor_tokens :]

    def _find_anchor(self) -> None:
        """Find the text to put before a continuation while it is encoded; mostly none.

        SentencePiece tokenizers put a space before every text. A continuation " World" must not get a second one, and
        "World" must get none. After a line break they add none, so a line break is encoded with it and cut off.
        """
        alone = self._tokenizer.encode_text("a", special=False)
        anchor = self._tokenizer.encode_text("\n", special=False)
        both = self._tokenizer.encode_text("\na", special=False)
        if both[: len(anchor)] == anchor and both[len(anchor) :] != alone:
            self._anchor = "\n"
            self._anchor_tokens = len(anchor)

    def _place_by_words(self, text: str, spans: Sequence[Span]) -> Placed | None:
        """Place spans by looking words up; None if only the tokenizer itself can."""
        if self._words is None:
            return None

        # Spans may touch, so each border is looked for once.
        borders = sorted({*chain.from_iterable(spans)})
        cut = self._words.cut_ids(text, borders)
        if cut is None:
            return None
        ids, tokens = cut
        return Placed(ids, _runs_of(spans, tokens))

    def _place_by_offsets(
        self,
        text: str,
        spans: Sequence[Span],
        encoding: Encoding,
    ) -> Placed:
        """Find the tokens that hold characters of the spans.

        Example: an answer that begins with a line break, within a token, and ends with a tag that includes the space
        after it (`rstrip`). Both tokens are trained.

            text      <|assistant|> \\n [\\n P o n g <|end|>] \\n <|user|>       [ ] is the span
            tokens    <|assistant|>  \\n\\n   Pong  <|end|>\\n    <|user|>
            trained                  x        x     x
        """
        begins_inside = False
        runs: list[tuple[int, int]] = []
        for start, stop in spans:
            # The first token, which may begin before the span.
            first = _token_at(encoding, start, len(text))
            if _begins_before(encoding, first, start):
                _, end_of_token = self._span_of_token(text, encoding, first)
                if end_of_token <= start:
                    first += 1  # a tag of the prompt, which includes the space after it
                else:
                    begins_inside = True

            if self._looks_ahead and self._differs_alone(text[:start], encoding, first):
                begins_inside = True

            # The token after the last one. A token across the end belongs to the span, unless only its space does.
            end = _token_at(encoding, stop, len(text))
            if _begins_before(encoding, end, stop):
                begin_of_token, _ = self._span_of_token(text, encoding, end)
                if begin_of_token < stop:
                    end += 1
            runs.append((first, end))

        if begins_inside and self._keeps_prompts:
            return self._place_by_pieces(text, spans)
        return Placed(encoding.ids, runs, begins_inside)

    def _place_by_pieces(self, text: str, spans: Sequence[Span]) -> Placed:
        """Encode a text piece by piece, cut at each border of a span."""
        ids: list[int] = []
        tokens: dict[int, int] = {}
        borders = sorted({0, len(text), *chain.from_iterable(spans)})
        for begin, end in pairwise(borders):
            tokens[begin] = len(ids)
            ids += self.encode(text[begin:end], after_something=begin > 0)
        tokens[len(text)] = len(ids)
        return Placed(ids, _runs_of(spans, tokens))

    def _differs_alone(
        self,
        prompt: str,
        encoding: Encoding,
        first: int,
    ) -> bool:
        """True if a prompt has other ids alone than in a text, in whose encoding token `first` follows it."""
        # What comes before the last added token has no influence on what follows it. Prompts mostly end alike from there
        # on, so the ids of that end are in the cache.
        token = first - 1
        while token > 0 and encoding.ids[token] not in self._tokenizer.added_tokens:
            token -= 1
        begin = 0
        if token > 0:
            begin, _ = self._span_of_token(prompt, encoding, token)
        token = max(token, 0)
        return self._ids_alone(prompt[begin:]) != encoding.ids[token:first]

    def _span_of_token(
        self,
        text: str,
        encoding: Encoding,
        token: int,
    ) -> Span:
        """Return where a token is in a text, without the space that an added token includes (`lstrip`, `rstrip`)."""
        begin, end = encoding.token_to_chars(token) or (0, 0)
        content = self._tokenizer.added_tokens.get(encoding.ids[token])
        if not content:
            return begin, end

        # An added token's offsets may hold spaces around it; its content does not.
        start = text.find(content, begin, end)
        if start < 0:
            return begin, end
        return start, start + len(content)


def _runs_of(spans: Sequence[Span], tokens: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return the tokens of spans. `tokens`: border of a span -> the first token after it."""
    return [(tokens[start], tokens[stop]) for start, stop in spans]


def _looks_ahead(backend: tokenizers.Tokenizer) -> bool:
    """True if the ids of a text may change with what follows it, though no token lies across its end.

    Patterns look at what follows white space, and an added token may have to be a whole word. Plain BPE always merges
    the inside of a text in one way, whatever follows.
    """
    if any(token.single_word for token in backend.get_added_tokens_decoder().values()):
        return True
    if not isinstance(backend.model, models.BPE):
        return True
    if not isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace | None):
        return True

    # Normalizers that look at one place at a time, whatever is after it.
    normalizer = backend.normalizer
    steps: list[object] = [normalizer]
    if isinstance(normalizer, normalizers.Sequence):
        steps = [normalizer[i] for i in range(len(normalizer))]
    local = normalizers.Prepend | normalizers.Replace | None
    return not all(isinstance(step, local) for step in steps)


def _token_at(encoding: Encoding, border: int, length: int) -> int:
    """Return the index of the first token that holds a character at or after a border."""
    # Characters that normalization drops are in no token.
    for position in range(border, length):
        token = encoding.char_to_token(position)
        if token is not None:
            return token
    return len(encoding.ids)


def _begins_before(
    encoding: Encoding,
    token: int,
    border: int,
) -> bool:
    """True if a token begins before a border, so that it lies across it."""
    if token >= len(encoding.ids):
        return False
    chars = encoding.token_to_chars(token)
    return chars is not None and chars[0] < border
