"""Find prepared rows by length, source, problem or words, and show them a page at a time.

The rows stay in their files, which are mapped: only their lengths and the rows of one page are read. The
search for words reads as many rows as fit into a moment; the next page continues where that search ended.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from kubetune.config.resolved import load_resolved, resolved
from kubetune.config.schema import Config
from kubetune.data.findings.sentences import find
from kubetune.data.inspect.gallery import Picked, shown
from kubetune.data.prepared.fingerprint import kept_stats
from kubetune.data.prepared.prepare import LABELS, damage_of
from kubetune.data.prepared.row_writer import FILES
from kubetune.data.prepared.rows import Rows
from kubetune.data.spec import DataSpec
from kubetune.data.text.class_labels import Labels
from kubetune.data.text.tokenizer import Tokenizer, cache_folder, load_tokenizer
from kubetune.rundir.starts import day_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

PAGE = 20  # rows

# Choices of a page, by their names in an address.
ORDERS = {
    "file": "as in the files",
    "longest": "longest first",
    "shortest": "shortest first",
    "least": "least trained",
}
PROBLEMS = {
    "limit": "as long as data.max_length allows",
    "little": "less than 5 % trained",
    "repeated": "in the data more than once",
}
_SEARCH_SECONDS = 0.12
_SEARCH_BATCH = 256  # rows that are decoded to text at a time
_HASH_BATCH = 1 << 12  # rows that are hashed at a time
_FILTER_BATCH = 1 << 16  # rows that are filtered at a time


@dataclass(frozen=True)
class Query:
    """Which rows somebody wants to see."""

    split: str = "train"
    source: int | None = None  # index of the source, None for all
    low: int = 0  # tokens that a row must have at least
    high: int | None = None  # and at most, None without a limit
    problem: str = ""  # a key of PROBLEMS, "" for all rows
    order: str = "file"  # a key of ORDERS
    text: str = ""  # words that a row must hold
    at: int = 0  # index of the first row to look at, among those that fit


@dataclass(frozen=True)
class RowPage:
    """A page of rows."""

    rows: list[dict[str, Any]]  # as the template draws them
    total: int  # rows that fit everything but the text
    of: int  # rows of the split
    next: int | None  # the beginning of the next page, None after the last one


@dataclass(frozen=True)
class PreparedRows:
    """The prepared rows of a config. Each look maps them again, since pages that stay mapped count as memory."""

    folder: Path
    spec: DataSpec
    tokenizer: Tokenizer
    sources: dict[str, list[str]]  # paths, by split
    counts: dict[str, int]  # rows, by split
    labels: Labels | None  # of a classifier

    def findings(self) -> list[dict[str, Any]]:
        """Return what a person should know about these data."""
        stats = kept_stats(self.folder, self.spec)
        return [finding.to_json() for finding in find(self.spec, stats, self.tokenizer)]

    def look(self, query: Query) -> RowPage:
        """Return a page of rows. An unknown split has none."""
        if query.split not in self.counts:
            return RowPage([], 0, 0, None)
        rows = Rows(self.folder / query.split, ())
        # Without text and place, all pages of one list have the same filters, which are computed once.
        filters = replace(query, text="", at=0)
        fitting = _fitting(rows.folder, filters, self.spec.data.max_length)
        if query.text:
            page, after = self._with_text(rows, fitting, query)
        else:
            after = query.at + PAGE
            page = fitting[query.at : after].tolist()

        next_page = None
        if after < len(fitting):
            next_page = after
        return RowPage(
            rows=[self._show(rows, query.split, index) for index in page],
            total=len(fitting),
            of=len(rows),
            next=next_page,
        )

    def _with_text(
        self,
        rows: Rows,
        fitting: NDArray[np.uint32],
        query: Query,
    ) -> tuple[list[int], int]:
        """Return the next rows that hold all words, and where to continue."""
        # Without a hit in this time, the page is empty, and its link to the next one continues from here.
        words = query.text.lower().split()
        until = time.monotonic() + _SEARCH_SECONDS
        page: list[int] = []
        at = query.at

        # The file is read, not mapped: of a map, rows that lie far apart take a whole page of memory each.
        with (rows.folder / FILES["tokens"]).open("rb") as file:
            while at < len(fitting) and time.monotonic() < until:
                batch = fitting[at : at + _SEARCH_BATCH].tolist()
                tokens = [_read_tokens(file, rows, index) for index in batch]
                texts = self.tokenizer.backend.decode_batch(tokens, skip_special_tokens=False)
                for index, text in zip(batch, texts, strict=True):
                    at += 1
                    if _has_all(text.lower(), words):
                        page.append(index)
                    if len(page) == PAGE:
                        return page, at

        return page, at

    def _show(
        self,
        rows: Rows,
        split: str,
        index: int,
    ) -> dict[str, Any]:
        """Return a row as the template draws it."""
        tokens, trained = rows.row(index)
        images = []
        if self.spec.vision is not None:
            images = [image.path for image in rows.images(index)]
        rejected_begins_at = 0  # in a pair of answers
        if rows.splits is not None:
            rejected_begins_at = int(rows.splits[index])

        row = Picked(
            split,
            int(rows.source[index]),
            int(rows.record[index]),
            tokens.tolist(),
            bytes(trained.view(np.uint8)),
            images,
            self._target(rows, index),
            rejected_begins_at,
        )
        return shown(
            f"row {index + 1:,}",
            row,
            self.tokenizer,
            self.sources[split][row.source],
        )

    def _target(self, rows: Rows, index: int) -> Sequence[str] | None:
        """Return the label or the value that a classifier learns for a row, None for other tasks."""
        if self.labels is None or rows.targets is None:
            return None
        # As many numbers as there are classes, or values; one number for a single label.
        target = rows.targets[index]
        if self.labels.problem_type == "regression":
            return [f"{value:g}" for value in target]
        names = self.labels.names
        if self.labels.problem_type == "single_label_classification":
            return [names[int(target[0])]]
        # Several labels: 1 if the row has one, else 0.
        return [name for name, value in zip(names, target, strict=True) if value > 0]


def _has_all(text: str, words: Sequence[str]) -> bool:
    """True if a text has all of the words somewhere."""
    return all(word in text for word in words)


def _read_tokens(
    file: BinaryIO,
    rows: Rows,
    index: int,
) -> list[int]:
    """Return the tokens of a row. They are 4 bytes each, and rows follow each other in the file."""
    begin = int(rows.offsets[index])
    end = int(rows.offsets[index + 1])
    # By place, so that threads of two pages can read the same file.
    content = os.pread(file.fileno(), 4 * (end - begin), 4 * begin)
    tokens: list[int] = np.frombuffer(content, "u4").tolist()
    return tokens


@lru_cache(maxsize=2)
def _fitting(
    split: Path,
    query: Query,
    limit: int,
) -> NDArray[np.uint32]:
    """Return the indexes of the rows that fit a query without a text, in its order."""
    rows = Rows(split, ())
    indexes = np.empty(len(rows), np.uint32)
    count = 0
    for begin in range(0, len(rows), _FILTER_BATCH):
        batch = _fitting_batch(rows, slice(begin, begin + _FILTER_BATCH), query, limit)
        indexes[count : count + len(batch)] = batch
        count += len(batch)
    indexes.resize(count, refcheck=False)

    # Order. Equal rows stay as they are in the file.
    if query.problem == "repeated":
        return _repeated(indexes, _hashes(split))
    if query.order == "file":
        return indexes

    def key(batch: NDArray[np.uint32]) -> NDArray[np.uint32]:
        lengths: NDArray[np.uint32] = (
            rows.offsets[batch + np.uint32(1)] - rows.offsets[batch]
        ).astype(np.uint32)
        if query.order == "least":
            share: NDArray[np.float32] = np.divide(
                rows.trained_counts[batch], lengths, dtype=np.float32
            )
            # The bits of numbers that are not negative are in the order of the numbers.
            return share.view(np.uint32)
        # With unsigned numbers, the largest minus the length is smallest for the longest row.
        if query.order == "longest":
            np.subtract(np.uint32(0xFFFFFFFF), lengths, out=lengths)
        return lengths

    return _put_in_order(indexes, key)


def _put_in_order(
    indexes: NDArray[np.uint32],
    key: Callable[[NDArray[np.uint32]], NDArray[np.uint32]],
) -> NDArray[np.uint32]:
    """Put rows in the order of their keys, and rows with equal keys in the order of their indexes.

    Key and index become one number, so that one array is sorted in place; argsort takes several of its size.

        keys 7 5 7 of rows 0 1 2 → 7·2³²+0, 5·2³²+1, 7·2³²+2 → sorted, the lower 32 bits are the rows 1 0 2
    """
    numbers = np.empty(len(indexes), np.uint64)
    for begin in range(0, len(indexes), _FILTER_BATCH):
        batch = indexes[begin : begin + _FILTER_BATCH]
        numbers[begin : begin + _FILTER_BATCH] = (
            key(batch).astype(np.uint64) << np.uint64(32) | batch
        )
    numbers.sort()
    indexes[:] = numbers  # the lower 32 bits
    return indexes


def _repeated(indexes: NDArray[np.uint32], hashes: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Return the rows with a hash that occurs more than once, equal rows side by side. `hashes`: of all rows.

    Example: the hashes 5 9 5 are sorted to 5 5 9. The second equals the first, so 5 is repeated, and
    rows 0 and 2 have it.
    """
    in_order = hashes[indexes]
    in_order.sort()
    parts = [np.empty(0, np.uint64)]
    for begin in range(0, len(in_order), _FILTER_BATCH):
        # One more than the batch, so that each is compared with the one after it.
        batch = in_order[begin : begin + _FILTER_BATCH + 1]
        parts.append(np.unique(batch[1:][batch[1:] == batch[:-1]]))
    del in_order
    repeated = np.unique(np.concatenate(parts))

    count = 0
    for begin in range(0, len(indexes), _FILTER_BATCH):
        rows = indexes[begin : begin + _FILTER_BATCH]
        kept = rows[np.isin(hashes[rows], repeated)]
        # The written part lies before the part that is still to be read.
        indexes[count : count + len(kept)] = kept
        count += len(kept)
    indexes.resize(count, refcheck=False)

    # The place of a hash among those that are repeated has half of its size.
    return _put_in_order(
        indexes, lambda rows: np.searchsorted(repeated, hashes[rows]).astype(np.uint32)
    )


def _fitting_batch(
    rows: Rows,
    batch: slice,
    query: Query,
    limit: int,
) -> NDArray[np.uint32]:
    """Return the indexes of the rows of a batch that fit. Memory is taken only for the batch."""
    # n rows have n + 1 offsets.
    lengths = np.diff(rows.offsets[batch.start : batch.stop + 1])
    fits = lengths >= query.low
    if query.high is not None:
        fits &= lengths <= query.high
    if query.source is not None:
        fits &= rows.source[batch] == query.source
    if query.problem == "limit":
        fits &= lengths >= limit
    # Less than 5 %, in integers: 1 of 20 tokens is enough.
    elif query.problem == "little":
        fits &= rows.trained_counts[batch] * 20 < lengths

    indexes: NDArray[np.uint32] = (np.flatnonzero(fits) + batch.start).astype(np.uint32)
    return indexes


@lru_cache(maxsize=1)
def _hashes(split: Path) -> NDArray[np.uint64]:
    """Return a number for each row. Equal rows have the same number.

    It is the sum of a row's tokens, each multiplied by an odd number that depends on its position:

        row [7, 3] → (7 + 1) · odd(1) + (3 + 1) · odd(2)
    """
    offsets = Rows(split, ()).offsets
    hashes = np.zeros(len(offsets) - 1, np.uint64)
    # The file is read, not mapped: what is mapped would count as memory of the server.
    with (split / FILES["tokens"]).open("rb") as file:
        for begin in range(0, len(hashes), _HASH_BATCH):
            ends = offsets[begin : begin + _HASH_BATCH + 1] - offsets[begin]
            tokens = np.fromfile(file, "u4", int(ends[-1]))
            if not len(tokens):
                continue
            # The position of each token in its row: 1 2 3 | 1 2 | 1 …
            starts = np.repeat(ends[:-1], np.diff(ends))
            positions = np.arange(1, len(tokens) + 1, dtype=np.int64) - starts
            # The constants of Splitmix64 spread the positions; unsigned numbers wrap around.
            mixed = positions.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            odd = mixed | np.uint64(1)
            products = (tokens + np.uint64(1)) * odd
            # The sum of each row's products.
            hashes[begin : begin + _HASH_BATCH] = np.add.reduceat(products, ends[:-1])

    return hashes


def open_rows(config: Config, fingerprint: str) -> PreparedRows | None:
    """Return the prepared rows of this fingerprint, or None if this machine does not have all of them."""
    cache = cache_folder(config.data.cache)
    folder = cache / "prepared" / fingerprint[:32]
    if not fingerprint or damage_of(folder, fingerprint, cache) is not None:
        return None
    return _opened(folder, json.dumps(resolved(config)), cache)


@lru_cache(maxsize=3)
def _opened(
    folder: Path,
    settings: str,
    cache: Path,
) -> PreparedRows:
    """Return rows in a whole folder. `settings`: the config as JSON, which a cache can compare."""
    config = load_resolved(json.loads(settings))
    labels = None
    if (folder / LABELS).is_file():
        labels = Labels.read(folder / LABELS)
    paths: dict[str, list[str]] = {}
    counts: dict[str, int] = {}
    spec = DataSpec.of(config)
    # Opening the rows of a split only reads their number.
    for split, sources in spec.splits.items():
        paths[split] = [source.path for source in sources]
        counts[split] = len(Rows(folder / split, ()))
    return PreparedRows(
        folder,
        spec,
        tokenizer=load_tokenizer(config.model, cache, date=day_of(config.data)),
        sources=paths,
        counts=counts,
        labels=labels,
    )
