"""The data of the measurements: made from a seed, the same on every machine. Standard library only.

Token rows are words `t17` of a vocabulary in which word i is token i, so that a trainer that tokenises text and one
that is given ids see the same ids. Text rows are made-up words with natural frequencies, for measuring tokenisation.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import NormalDist

EOS = 1
FIRST_WORD, LAST_WORD = 10, 30_000
"""Ids that rows are drawn from; the lower ones are special tokens."""


@dataclass(frozen=True)
class Corpus:
    """Rows with log-normal lengths in tokens, clipped; `sigma` 0 makes all `longest` long.

    The first `unlabelled` (least, most) share of each row is prompt; at least one token always is. Before each row
    stands one of `beginnings` texts of `shared` tokens, in turn, which is prompt too.
    """

    rows: int
    mean: float = 200.0
    sigma: float = 0.75
    shortest: int = 16
    longest: int = 1024
    unlabelled: tuple[float, float] = (0.25, 0.65)
    seed: int = 0
    shared: int = 0
    beginnings: int = 1

    @property
    def max_length(self) -> int:
        """Tokens that no row has more of."""
        return self.shared + self.longest


@dataclass(frozen=True)
class Row:
    """Token ids; the first `prompt` of them are no labels."""

    ids: list[int]
    prompt: int

    @property
    def labels(self) -> list[int]:
        """The ids with -100 in place of the prompt, as Hugging Face trainers want them."""
        return [-100] * self.prompt + self.ids[self.prompt :]


def lengths(corpus: Corpus) -> list[int]:
    """Evenly spaced quantiles of the distribution, shuffled: every run has exactly the same lengths."""
    if not corpus.sigma:
        return [corpus.longest] * corpus.rows
    normal, middle = NormalDist(), math.log(corpus.mean) - corpus.sigma**2 / 2
    quantiles = (normal.inv_cdf((i + 0.5) / corpus.rows) for i in range(corpus.rows))
    found = [
        int(min(corpus.longest, max(corpus.shortest, math.exp(middle + corpus.sigma * quantile))))
        for quantile in quantiles
    ]
    random.Random(corpus.seed).shuffle(found)
    return found


def token_rows(corpus: Corpus, vocab_size: int) -> list[Row]:
    """Random ids that end with EOS."""
    draw = random.Random(corpus.seed + 1)
    last = min(vocab_size, LAST_WORD)
    begun = [
        [draw.randrange(FIRST_WORD, last) for _ in range(corpus.shared)]
        for _ in range(corpus.beginnings)
    ]
    rows = []
    for number, length in enumerate(lengths(corpus)):
        ids = [*(draw.randrange(FIRST_WORD, last) for _ in range(length - 1)), EOS]
        prompt = max(1, int(length * draw.uniform(*corpus.unlabelled)))
        rows.append(Row(begun[number % corpus.beginnings] + ids, corpus.shared + prompt))
    return rows


@dataclass(frozen=True)
class Pair:
    """Token ids of a prompt and of two answers to it."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]

    @property
    def sequences(self) -> list[Row]:
        """Both answers, each behind the prompt."""
        return [
            Row(self.prompt + answer, len(self.prompt)) for answer in (self.chosen, self.rejected)
        ]


def token_pairs(corpus: Corpus, vocab_size: int) -> list[Pair]:
    """The rows with a second answer each, as long as that of the row before it, if there is room."""
    draw, rows = random.Random(corpus.seed + 3), token_rows(corpus, vocab_size)
    lengths = [len(row.ids) - row.prompt for row in rows]
    pairs = []
    for row, length in zip(rows, [lengths[-1], *lengths], strict=False):
        length = min(length, corpus.max_length - row.prompt)
        rejected = [
            *(draw.randrange(FIRST_WORD, min(vocab_size, LAST_WORD)) for _ in range(length - 1)),
            EOS,
        ]
        pairs.append(Pair(row.ids[: row.prompt], row.ids[row.prompt :], rejected))
    return pairs


def write_pairs(path: Path, pairs: list[Pair]) -> None:
    """JSONL that holds each pair twice: `prompt`, `chosen` and `rejected` as texts, and `ids` of all three."""
    with path.open("w") as file:
        for pair in pairs:
            texts = {name: " ".join(map(word, ids)) for name, ids in vars(pair).items()}
            answers = {name: f" {texts[name]}" for name in ("chosen", "rejected")}
            file.write(json.dumps(texts | answers | {"ids": vars(pair)}) + "\n")


def word(token: int) -> str:
    """The text of a token of the word-level tokenizer."""
    return "<eos>" if token == EOS else f"t{token}"


def write_tokens(path: Path, rows: list[Row]) -> None:
    """JSONL that holds each row twice: `prompt` and `completion` as text, `input_ids` and `labels` as numbers."""
    with path.open("w") as file:
        for row in rows:
            words = [word(token) for token in row.ids]
            texts = {
                "prompt": " ".join(words[: row.prompt]),
                "completion": " ".join(words[row.prompt :]),
            }
            file.write(json.dumps(texts | {"input_ids": row.ids, "labels": row.labels}) + "\n")


def text_rows(corpus: Corpus) -> Iterator[dict[str, str]]:
    """`prompt` and `completion` of made-up words; a row's length counts words, some 1.3 tokens each."""
    draw = random.Random(corpus.seed + 2)
    vocabulary = _vocabulary(draw)
    # Zipf's law: the n-th word is as frequent as 1/n.
    frequency = list(accumulate(1 / n for n in range(1, len(vocabulary) + 1)))
    for length in lengths(corpus):
        words = draw.choices(vocabulary, cum_weights=frequency, k=length)
        cut = max(1, int(length * draw.uniform(*corpus.unlabelled)))
        yield {"prompt": " ".join(words[:cut]), "completion": " " + " ".join(words[cut:])}


def _vocabulary(draw: random.Random, size: int = 40_000) -> list[str]:
    syllables = [
        onset + vowel + coda
        for onset in "bdfgklmnprstvz"
        for vowel in "aeiou"
        for coda in ("", "n", "r", "s")
    ]
    found: dict[str, None] = {}
    while len(found) < size:
        found["".join(draw.choices(syllables, k=draw.choice((1, 2, 2, 3, 3, 4))))] = None
    return list(found)


def write_text(path: Path, corpus: Corpus) -> None:
    """JSONL with `prompt` and `completion`."""
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in text_rows(corpus))
