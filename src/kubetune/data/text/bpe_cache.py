"""Encode text by looking its words up, several times as fast, for byte-level BPE tokenizers.

These tokenizers (GPT-2, Llama 3, Qwen and many after them) split a text by a pattern and then work on each word alone,
so a word's ids can be remembered. The ids come from the tokenizer itself. So do those of texts that are not plain
ASCII: there Python's regular expressions might split differently.

    <|user|>It's 12    →  <|user|> | It | 's |  12     an added token, and three words
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Final

from tokenizers import Tokenizer
from tokenizers.models import BPE

from kubetune.data.reading.strict_json import JsonObject
from kubetune.data.text.tokenizer_files import QWEN2_SPLIT

# Words remembered at once: some hundred MB. When there are more, all are forgotten.
MOST_WORDS: Final = 1_000_000

# Characters of the longest word worth remembering: longer ones seldom come back.
LONGEST_WORD: Final = 64

_GPT2_SPLIT: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ASCII_REST: Final = r" ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ASCII_WORDS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\nA-Za-z0-9]?[A-Za-z]+"
# Patterns of tokenizers, and what they mean in ASCII, where Python's engine finds the same words. With each of them a
# word of a text is also a word when it stands alone.
_SPLITS: Final = {
    QWEN2_SPLIT: f"{_ASCII_WORDS}|[0-9]|{_ASCII_REST}",
    QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|"): f"{_ASCII_WORDS}|[0-9]{{1,3}}|{_ASCII_REST}",
    _GPT2_SPLIT: r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+",
}
# White space and control characters as byte-level vocabularies write them; the rest of ASCII stands for itself.
_BYTE_LEVEL: Final = {code: chr(code + 256) for code in range(33)}
_PLAIN: Final = re.compile(r"[\t\n\r\x20-\x7e]*")


class Words:
    """The words of one tokenizer, remembered as they come."""

    def __init__(self, backend: Tokenizer, pattern: str) -> None:
        self._backend = backend
        self._ids_of_word = _IdsOfWord(backend)
        self._find_words = re.compile(pattern, re.ASCII).findall

        decoder = backend.get_added_tokens_decoder()
        self._added = {str(token): id for id, token in decoder.items()}

        # The longest first, as the tokenizer takes them. With its group, every second part of a split is such a token.
        self._split: Callable[[str], list[Any]] = lambda text: [text]
        if self._added:
            longest_first = sorted(self._added, key=len, reverse=True)
            alternatives = "|".join(map(re.escape, longest_first))
            self._split = re.compile(f"({alternatives})").split

        # What templates write around every turn is looked up once.
        self._frequent = lru_cache(maxsize=1024)(self._look_up)

    @classmethod
    def of(cls, backend: Tokenizer) -> Words | None:
        """Return the words of a tokenizer, None for one that has to see each text as a whole."""
        if not isinstance(backend.model, BPE) or backend.model.dropout:
            return None
        # NFC changes no ASCII text.
        if backend.normalizer is not None and _state(backend.normalizer) != {"type": "NFC"}:
            return None
        # Added tokens with these settings depend on the text around them.
        for token in backend.get_added_tokens_decoder().values():
            if token.normalized or token.lstrip or token.rstrip or token.single_word:
                return None
        if backend.pre_tokenizer is None:
            return None
        pattern = _pattern(_state(backend.pre_tokenizer))
        if pattern not in _SPLITS:
            return None
        return cls(backend, _SPLITS[pattern])

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text. Special tokens are among them only if the text holds them."""
        ids: list[int] = []
        for i, part in enumerate(self._split(text)):
            if i % 2:
                ids.append(self._added[part])
            elif part:
                ids += self._frequent(part)
        return ids

    def cut_ids(self, text: str, borders: Sequence[int]) -> tuple[list[int], dict[int, int]] | None:
        """Return the ids of a text, and for each border in it (sorted offsets) the index of the first token after it.

        None if the text before a border has other ids when it stands alone, as when a token lies across the border.

            text      <|user|>Hi<|end|>      borders 8, 17
            ids       [5, 312, 6]            tokens  {8: 1, 17: 3}
        """
        ids: list[int] = []
        tokens: dict[int, int] = {}
        number = 0
        begin = 0
        for i, part in enumerate(self._split(text)):
            end = begin + len(part)
            is_added = i % 2 == 1

            # The borders within this part, as offsets in it.
            cuts: list[int] = []
            while number < len(borders) and borders[number] < end:
                cuts.append(borders[number] - begin)
                number += 1
            if cuts and cuts[0] == 0:
                tokens[begin] = len(ids)
                del cuts[0]

            if cuts:
                if is_added:
                    return None  # an added token cannot be cut
                cut = self._look_up_cut(part, cuts)
                if cut is None:
                    return None
                part_ids, counts = cut
                for place, count in zip(cuts, counts, strict=True):
                    tokens[begin + place] = len(ids) + count
                ids += part_ids
            elif is_added:
                ids.append(self._added[part])
            elif part:
                ids += self._frequent(part)

            begin = end

        for border in borders[number:]:
            tokens[border] = len(ids)
        return ids, tokens

    def _look_up_cut(self, text: str, cuts: Sequence[int]) -> tuple[list[int], list[int]] | None:
        """Return the ids of a text without added tokens, and how many of them lie before each cut; None as `cut_ids`."""
        ids = self._look_up(text)
        counts: list[int] = []
        count = 0
        begin = 0
        for cut in cuts:
            # The same ids as those of the whole text, or a token lies across the cut.
            before = self._frequent(text[begin:cut])
            if ids[count : count + len(before)] != before:
                return None
            count += len(before)
            counts.append(count)
            begin = cut

        return ids, counts

    def _look_up(self, text: str) -> list[int]:
        if _PLAIN.fullmatch(text) is None:
            return self._backend.encode(text, add_special_tokens=False).ids
        # Written for speed, because every word of the data comes here.
        return list(chain.from_iterable(map(self._ids_of_word.__getitem__, self._find_words(text))))


class _IdsOfWord(dict[str, list[int]]):
    """ASCII word -> ids. The tokenizer's model encodes a word that was not seen before, which needs no splitting."""

    def __init__(self, backend: Tokenizer) -> None:
        super().__init__()
        self._model = backend.model

    def __missing__(self, word: str) -> list[int]:
        ids = [token.id for token in self._model.tokenize(word.translate(_BYTE_LEVEL))]
        if len(word) <= LONGEST_WORD:
            if len(self) >= MOST_WORDS:
                self.clear()
            self[word] = ids
        return ids


def _state(part: Any) -> JsonObject:
    """Return a part of a tokenizer as it is in tokenizer.json."""
    state: JsonObject = json.loads(part.__getstate__())
    return state


def _pattern(pre_tokenizer: JsonObject) -> str:
    """Return the pattern whose matches are the words; empty if words are found in another way."""
    *splits, last = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return ""

    # ByteLevel either splits by GPT-2's pattern itself, or follows one step that splits.
    if last["use_regex"]:
        return "" if splits else _GPT2_SPLIT
    if len(splits) != 1:
        return ""
    split = splits[0]
    if split["type"] != "Split" or split["behavior"] != "Isolated" or split["invert"]:
        return ""
    return str(split["pattern"].get("Regex", ""))
