"""Rows worth looking at, picked as all rows go by: the first of each source, the longest, the least trained, repeats.

For the data's page (reporting/data_page). Keeps token ids of a few dozen rows and no others, and the paths of images.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from kubetune.config.schema import SourceConfig
from kubetune.data.prepared.pipeline import BatchResult
from kubetune.data.prepared.row_watch import labels_of
from kubetune.data.reading.images import thumbnail
from kubetune.data.reading.strict_json import JsonObject
from kubetune.data.spec import Split
from kubetune.data.text.class_labels import Labels
from kubetune.data.text.tokenizer import Tokenizer

# Nobody reads more of one row. An image, hundreds of equal tokens, counts as one.
_MOST_TOKENS: Final = 3000
# Images of a row that are shown.
_MOST_IMAGES: Final = 4
# Rows that are picked: the first of each source, and those that come again.
_ROWS_OF_A_SOURCE: Final = 3
_MOST_REPEATS: Final = 5


@dataclass(frozen=True)
class Picked:
    """A row with where it is from."""

    split: str
    source: int  # index among the sources of the split
    record: int  # index in the source
    ids: Sequence[int]
    trained: bytes
    images: Sequence[str] = ()  # paths
    labels: Sequence[str] | None = None  # of a classifier
    second: int = 0  # where the rejected answer of a pair begins

    @property
    def trained_share(self) -> float:
        """Return the share of the tokens that are trained, 0 to 1."""
        return sum(self.trained) / max(1, len(self.trained))


class Gallery:
    """Give it every result of `encode_batches`; `rows` are then those picked, each with why."""

    def __init__(self) -> None:
        self._first: dict[tuple[Split, int], list[Picked]] = {}  # by split and source
        self._longest: Picked | None = None
        self._least: Picked | None = None  # with the smallest share that is trained
        # Rows that came more than once. Equal rows have equal digests.
        self._digests: set[int] = set()
        self._times: Counter[int] = Counter()  # how often a row came again, by digest
        self._repeats: dict[int, Picked] = {}  # by digest

    def add(self, result: BatchResult, labels: Labels | None) -> None:
        """Look at the rows of one batch. `labels`: of a classifier."""
        names = list(labels_of(labels, result.chunk)) if labels is not None else None
        first = self._first.setdefault((result.split, result.source), [])
        begin = 0  # of a row among the tokens of the batch
        for number, length in enumerate(result.chunk.lengths):
            digest = result.digests[number]
            if digest in self._digests:
                self._times[digest] += 1
            self._digests.add(digest)

            # Most rows are none of these, and nothing of them is kept.
            trained_share = result.chunk.labels[number] / max(1, length)
            is_first = len(first) < _ROWS_OF_A_SOURCE
            is_longest = self._longest is None or length > len(self._longest.ids)
            is_least = self._least is None or trained_share < self._least.trained_share
            is_repeat = (
                digest in self._times
                and digest not in self._repeats
                and len(self._repeats) < _MOST_REPEATS
            )
            if is_first or is_longest or is_least or is_repeat:
                of_row = names[number] if names is not None else None
                row = _pick(result, number, begin, of_row)
                if is_first:
                    first.append(row)
                if is_longest:
                    self._longest = row
                if is_least:
                    self._least = row
                if is_repeat:
                    self._repeats[digest] = row

            begin += length

    def rows(
        self,
        tokenizer: Tokenizer,
        sources: Mapping[Split, Sequence[SourceConfig]],
    ) -> list[JsonObject]:
        """Return the picked rows as pages show them (`shown`), each with `why`."""
        paths: dict[tuple[str, int], str] = {}
        for split, of_split in sources.items():
            for number, source in enumerate(of_split):
                paths[split, number] = source.path

        lines = []
        for why, row in self._picked():
            path = paths[row.split, row.source]
            lines.append(shown(why, row, tokenizer, path))
        return lines

    def _picked(self) -> Iterator[tuple[str, Picked]]:
        """Yield the picked rows, each with the reason."""
        for (split, _), rows in self._first.items():
            for number, row in enumerate(rows, 1):
                yield f"row {number} of {split}", row
        if self._longest is not None:
            yield "the longest row that is kept", self._longest
        # A row of which nothing is trained has a finding of its own.
        if self._least is not None and any(self._least.trained):
            yield "the row with the smallest share that is trained", self._least
        for digest, row in self._repeats.items():
            yield f"appears {self._times[digest] + 1:,} times", row


def _pick(
    result: BatchResult,
    number: int,
    begin: int,
    labels: Sequence[str] | None,
) -> Picked:
    """Return row `number` of a batch, whose tokens begin at `begin`."""
    # The tokens of all rows of a batch lie end to end.
    chunk = result.chunk
    end = begin + chunk.lengths[number]
    return Picked(
        split=result.split,
        source=result.source,
        record=chunk.rows[number],
        ids=chunk.tokens[begin:end],
        trained=bytes(chunk.trained[begin:end]),
        images=[image.path for image in chunk.images[number]],
        labels=labels,
        second=chunk.splits[number],
    )


def brief(text: str) -> str:
    """Return a text with each run of equal tokens in angle brackets, as images have, in short: `<image>×256`."""
    # Two of them stay as they are: only from three on is the short form shorter.
    return re.sub(r"(<[^<>]+>)\1{2,}", lambda run: f"{run[1]}×{len(run[0]) // len(run[1])}", text)


def shown(
    why: str,
    row: Picked,
    tokenizer: Tokenizer,
    path: str,
) -> JsonObject:
    """Return a row as pages show it. `path`: of its source.

    `record` counts from 1; `pieces` are texts with what they are; `images` are small copies as addresses of data.
    """
    # A pair of answers is two sequences end to end, of which the rejected one begins at `second`.
    chosen = slice(0, row.second or len(row.ids))
    pieces, shown_tokens = _pieces(row, chosen, tokenizer, rejected=False)
    if row.second:
        # What both are answers to is shown once.
        asked = row.trained.find(1)
        begin = row.second + asked
        is_same = list(row.ids[:asked]) == list(row.ids[row.second : begin])
        repeated = asked if is_same and not any(row.trained[row.second : begin]) else 0
        rejected = slice(row.second + repeated, len(row.ids))
        more_pieces, more_tokens = _pieces(
            row,
            rejected,
            tokenizer,
            rejected=True,
        )
        pieces += more_pieces
        shown_tokens += repeated + more_tokens

    return {
        "why": why,
        "path": path,
        "record": row.record + 1,
        "tokens": len(row.ids),
        "trained": sum(row.trained),
        "labels": row.labels,
        "cut": shown_tokens < len(row.ids),
        "pieces": pieces,
        "images": [thumbnail(image) for image in row.images[:_MOST_IMAGES]],
        "more_images": max(0, len(row.images) - _MOST_IMAGES),
    }


def _pieces(
    row: Picked,
    part: slice,
    tokenizer: Tokenizer,
    *,
    rejected: bool,
) -> tuple[list[JsonObject], int]:
    """Return one sequence of a row in pieces that are alike, and how many of its tokens these are."""
    special = tokenizer.special_ids
    tokens = _first_tokens(row.ids[part], row.trained[part], special)

    def kind(token: tuple[int, int]) -> tuple[bool, bool]:
        id, trained = token
        return bool(trained), id in special

    # A new piece begins wherever one of the two changes: a prompt, `<eos>`, an answer.
    pieces = []
    for (trained, is_special), run in groupby(tokens, key=kind):
        text = tokenizer.decode([id for id, _ in run], skip_special_tokens=False)
        pieces.append(
            {"text": brief(text), "trained": trained, "special": is_special, "rejected": rejected}
        )

    return pieces, len(tokens)


def _first_tokens(
    ids: Sequence[int],
    trained: bytes,
    special: Collection[int],
) -> list[tuple[int, int]]:
    """Return the tokens that are shown, each with whether it is trained. A run of a special token counts as one."""
    tokens: list[tuple[int, int]] = []
    read = 0  # as people count: hundreds of tokens of an image are one
    # Of 5 7 9 9 9 8, with 9 a special token, the runs are 5 | 7 | 9 9 9 | 8 and count as four.
    for (id, _), run in groupby(zip(ids, trained, strict=True)):
        same = list(run)
        if id in special:
            tokens += same
            read += 1
        else:
            tokens += same[: _MOST_TOKENS - read]
            read += len(same)

        if read >= _MOST_TOKENS:
            break

    return tokens
