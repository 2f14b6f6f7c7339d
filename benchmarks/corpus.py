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
from itertools import accumulate, product
from pathlib import Path
from statistics import NormalDist

EOS = 1
# Ids that rows are drawn from. Lower ones are special tokens.
FIRST_WORD = 10
LAST_WORD = 30_000


@dataclass(frozen=True)
class Corpus:
    """Rows with log-normal lengths in tokens."""

    rows: int
    mean: float = 200.0  # tokens of a row
    sigma: float = 0.75  # of the logarithm of lengths; 0: all rows are `longest` long
    shortest: int = 16
    longest: int = 1024
    # Least and most share of a row that is prompt. At least one token is.
    unlabelled: tuple[float, float] = (0.25, 0.65)
    seed: int = 0
    shared: int = 0  # tokens of a text in front of each row, which is prompt too
    beginnings: int = 1  # number of such texts, which rows have in turn

    @property
    def max_length(self) -> int:
        """Return the most tokens that a row may have."""
        return self.shared + self.longest


@dataclass(frozen=True)
class Row:
    """Token ids of a prompt and its completion."""

    ids: list[int]
    prompt: int  # how many of them are prompt, and no labels

    @property
    def labels(self) -> list[int]:
        """Return the ids with -100 in place of the prompt, as Hugging Face trainers want them."""
        return [-100] * self.prompt + self.ids[self.prompt :]


def lengths(corpus: Corpus) -> list[int]:
    """Return the length of each row in tokens: evenly spaced quantiles of the distribution, shuffled."""
    # Not drawn, so that few rows have the distribution too: of 4 rows the quantiles 1/8, 3/8, 5/8 and 7/8.
    if not corpus.sigma:
        return [corpus.longest] * corpus.rows
    normal = NormalDist()
    middle = math.log(corpus.mean) - corpus.sigma**2 / 2
    result = []
    for number in range(corpus.rows):
        quantile = normal.inv_cdf((number + 0.5) / corpus.rows)
        length = math.exp(middle + corpus.sigma * quantile)
        result.append(int(min(corpus.longest, max(corpus.shortest, length))))
    random.Random(corpus.seed).shuffle(result)
    return result


def token_rows(corpus: Corpus, vocab_size: int) -> list[Row]:
    """Return rows of random ids that end with EOS."""
    draw = random.Random(corpus.seed + 1)
    beginnings = [_words(draw, corpus.shared, vocab_size) for _ in range(corpus.beginnings)]
    rows = []
    for number, length in enumerate(lengths(corpus)):
        ids = [*_words(draw, length - 1, vocab_size), EOS]
        prompt = max(1, int(length * draw.uniform(*corpus.unlabelled)))
        beginning = beginnings[number % corpus.beginnings]
        rows.append(Row(beginning + ids, corpus.shared + prompt))
    return rows


def _words(draw: random.Random, number: int, vocab_size: int) -> list[int]:
    stop = min(vocab_size, LAST_WORD)
    return [draw.randrange(FIRST_WORD, stop) for _ in range(number)]


@dataclass(frozen=True)
class Pair:
    """Token ids of a prompt and of two answers to it."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]

    @property
    def sequences(self) -> list[Row]:
        """Return both answers, each behind the prompt."""
        number = len(self.prompt)
        return [Row(self.prompt + self.chosen, number), Row(self.prompt + self.rejected, number)]


def token_pairs(corpus: Corpus, vocab_size: int) -> list[Pair]:
    """Return the rows with a second answer each, as long as that of the row before it, if there is room."""
    draw = random.Random(corpus.seed + 3)
    rows = token_rows(corpus, vocab_size)
    pairs = []
    before = rows[-1]
    for row in rows:
        length = min(len(before.ids) - before.prompt, corpus.max_length - row.prompt)
        rejected = [*_words(draw, length - 1, vocab_size), EOS]
        pairs.append(Pair(row.ids[: row.prompt], row.ids[row.prompt :], rejected))
        before = row
    return pairs


def write_pairs(path: Path, pairs: list[Pair]) -> None:
    """Write JSONL that holds each pair twice: `prompt`, `chosen` and `rejected` as texts, and `ids` of all three."""
    with path.open("w") as file:
        for pair in pairs:
            line = {
                "prompt": text(pair.prompt),
                "chosen": f" {text(pair.chosen)}",
                "rejected": f" {text(pair.rejected)}",
                "ids": vars(pair),
            }
            file.write(json.dumps(line) + "\n")


def word(token: int) -> str:
    """Return the text of a token of the word-level tokenizer."""
    return "<eos>" if token == EOS else f"t{token}"


def text(ids: list[int]) -> str:
    """Return the text of tokens of the word-level tokenizer."""
    return " ".join(map(word, ids))


def write_tokens(path: Path, rows: list[Row]) -> None:
    """Write JSONL that holds each row twice: `prompt` and `completion` as text, `input_ids` and `labels` as numbers."""
    with path.open("w") as file:
        for row in rows:
            line = {
                "prompt": text(row.ids[: row.prompt]),
                "completion": text(row.ids[row.prompt :]),
                "input_ids": row.ids,
                "labels": row.labels,
            }
            file.write(json.dumps(line) + "\n")


def text_rows(corpus: Corpus) -> Iterator[dict[str, str]]:
    """Yield `prompt` and `completion` of made-up words. A row's length counts words, some 1.3 tokens each."""
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
        "".join(parts) for parts in product("bdfgklmnprstvz", "aeiou", ("", "n", "r", "s"))
    ]
    words: dict[str, None] = {}  # an ordered set
    while len(words) < size:
        number = draw.choice((1, 2, 2, 3, 3, 4))
        words["".join(draw.choices(syllables, k=number))] = None
    return list(words)


def write_text(path: Path, corpus: Corpus) -> None:
    """Write JSONL with `prompt` and `completion`."""
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in text_rows(corpus))
