"""Rows worth looking at, picked as all rows go by: the first of each source, the longest, the least trained, repeats.

For the data's page (reporting/data_page). Keeps token ids of a few dozen rows and no others, and the paths of images.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from kubetune.data.prepared.pipeline import Result
from kubetune.data.reading.images import thumbnail
from kubetune.data.text.tokenizer import Tokenizer

_MOST_TOKENS = 3000
"""More of one row than this is no longer read by anybody. An image, hundreds of equal tokens, counts as one."""

_MOST_IMAGES = 4
"""So many images of a row are shown."""


@dataclass(frozen=True)
class Picked:
    """A row with where it is from: the index of its source, and of its record in it. `labels`: what it is told as;
    `second`: the beginning of the rejected answer of a pair."""

    split: str
    source: int
    record: int
    ids: Sequence[int]
    trained: bytes
    images: Sequence[str] = ()
    labels: Sequence[str] | None = None
    second: int = 0

    @property
    def trained_share(self) -> float:
        """Share of the tokens that are trained, 0 to 1."""
        return sum(self.trained) / max(1, len(self.trained))


class Gallery:
    """Give it every result of `encode_batches`; `rows` are then those picked, each with why."""

    def __init__(self, per_source: int = 3, repeats: int = 5) -> None:
        self._per_source, self._most_repeats = per_source, repeats
        self._first: dict[tuple[str, int], list[Picked]] = {}
        self._longest: Picked | None = None
        self._least: Picked | None = None
        self._seen: dict[int, tuple[str, int, int]] = {}
        self._repeats: dict[int, Picked] = {}
        self._times: Counter[int] = Counter()

    def add(self, result: Result, said: Sequence[Sequence[str] | None]) -> None:
        """Look at the rows of one batch. `said`: the labels of each."""
        digests = result.digests
        end = 0
        for number, length in enumerate(result.chunk.lengths):
            begin, end = end, end + length
            record = result.chunk.rows[number]
            first = self._first.setdefault((result.split, result.source), [])
            is_longest = self._longest is None or length > len(self._longest.ids)
            labels = result.chunk.labels[number] / max(1, length)
            is_least = self._least is None or labels < self._least.trained_share
            again = digests[number] in self._seen
            self._seen.setdefault(digests[number], (result.split, result.source, record))
            if again:
                self._times[digests[number]] += 1
            shown = again and (
                digests[number] in self._repeats or len(self._repeats) < self._most_repeats
            )
            if not (len(first) < self._per_source or is_longest or is_least or shown):
                continue
            row = Picked(result.split, result.source, record, result.chunk.tokens[begin:end],
                         bytes(result.chunk.trained[begin:end]),
                         [image.path for image in result.chunk.images[number]], said[number],
                         result.chunk.splits[number])  # fmt: skip
            if len(first) < self._per_source:
                first.append(row)
            self._longest = row if is_longest else self._longest
            self._least = row if is_least else self._least
            if shown:
                self._repeats.setdefault(digests[number], row)

    def rows(self, tokenizer: Tokenizer, sources: dict[Any, Any]) -> list[dict[str, Any]]:
        """The picked rows, ready to be shown: `why`, `path`, `record` from 1, `tokens`, `trained`, `pieces`, and small
        copies of their `images` as addresses of data."""
        picked = [
            (f"row {number} of {row.split}", row)
            for rows in self._first.values()
            for number, row in enumerate(rows, 1)
        ]
        if self._longest is not None:
            picked.append(("the longest row that is kept", self._longest))
        if self._least is not None and self._least.trained and any(self._least.trained):
            picked.append(("the row with the smallest share that is trained", self._least))
        picked += [
            (f"appears {self._times[digest] + 1:,} times", row)
            for digest, row in self._repeats.items()
        ]
        return [
            shown(why, row, tokenizer, sources[row.split][row.source].path) for why, row in picked
        ]


def brief(text: str) -> str:
    """A text with its images, which are hundreds of equal tokens, in one line."""
    return re.sub(r"(<[^<>]+>)\1{2,}", lambda run: f"{run[1]}×{len(run[0]) // len(run[1])}", text)


def shown(why: str, row: Picked, tokenizer: Tokenizer, path: str) -> dict[str, Any]:
    """A row as pages show it, which `Gallery.rows` describes. `path`: of its source."""
    special = {
        id for id, token in tokenizer.backend.get_added_tokens_decoder().items() if token.special
    }
    ends = (row.second, len(row.ids)) if row.second else (len(row.ids),)
    pieces, shown = list[dict[str, Any]](), 0
    for begin, end in zip((0, *ends), ends, strict=False):
        tokens = _first_tokens(row.ids[begin:end], row.trained[begin:end], special)
        shown += len(tokens)
        for (trained, is_special), run in groupby(
            tokens, key=lambda token: (bool(token[1]), token[0] in special)
        ):
            text = brief(tokenizer.decode([id for id, _ in run], skip_special_tokens=False))
            pieces.append(
                {"text": text, "trained": trained, "special": is_special, "rejected": begin > 0}
            )
    return {
        "why": why,
        "path": path,
        "record": row.record + 1,
        "tokens": len(row.ids),
        "trained": sum(row.trained),
        "labels": row.labels,
        "cut": shown < len(row.ids),
        "pieces": pieces,
        "images": [thumbnail(image) for image in row.images[:_MOST_IMAGES]],
        "more_images": max(0, len(row.images) - _MOST_IMAGES),
    }


def _first_tokens(ids: Sequence[int], trained: bytes, special: set[int]) -> list[tuple[int, int]]:
    """The tokens of a sequence that are shown, and whether each is trained; a run of a special token counts as one."""
    found: list[tuple[int, int]] = []
    read = 0
    for (id, _), run in groupby(zip(ids, trained, strict=True)):
        same = list(run)
        found += same[: _MOST_TOKENS - read] if id not in special else same
        read += 1 if id in special else len(same)
        if read >= _MOST_TOKENS:
            break
    return found
