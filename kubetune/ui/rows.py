"""Prepared rows looked through: those of a length, a source, a problem or with words, a page at a time.

The rows stay where they are, in files that are mapped: what is read is their lengths, and the rows of one page. Words
are looked for in so many rows as a moment allows; the next page goes on where that one ended.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kubetune.config.load import load_resolved, resolved
from kubetune.config.schema import Config
from kubetune.data.findings.sentences import find
from kubetune.data.inspect.gallery import Picked, shown
from kubetune.data.prepared.fingerprint import kept_stats
from kubetune.data.prepared.prepare import LABELS, damage_of
from kubetune.data.prepared.row_writer import FILES
from kubetune.data.prepared.rows import Rows
from kubetune.data.reading.splits import split_sources
from kubetune.data.text.labels import Labels
from kubetune.data.text.tokenizer import Tokenizer, cache_folder, load_tokenizer
from kubetune.rundir.starts import day_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

PAGE = 20
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
_SECONDS, _BATCH, _CHUNK, _PART = 0.12, 256, 1 << 12, 1 << 16


@dataclass(frozen=True)
class Query:
    """Wishes of somebody who looks through rows. `at`: the first of the found ones that is looked at."""

    split: str = "train"
    source: int | None = None
    low: int = 0
    high: int | None = None
    problem: str = ""
    order: str = "file"
    text: str = ""
    at: int = 0


@dataclass(frozen=True)
class Found:
    """A page of rows. `total`: rows that fit all but the text; `next`: where the next page begins, if there is one."""

    rows: list[dict[str, Any]]
    total: int
    of: int
    next: int | None


@dataclass(frozen=True)
class Opened:
    """The prepared rows of a config. They are mapped for each look anew: pages that stay so count as memory."""

    folder: Path
    config: Config
    tokenizer: Tokenizer
    sources: dict[str, list[str]]
    counts: dict[str, int]
    labels: Labels | None

    def findings(self) -> list[dict[str, Any]]:
        """Return what a person should know about these data."""
        stats = kept_stats(self.folder, self.config, images=self.config.sees)
        return [finding.to_json() for finding in find(self.config, stats, self.tokenizer)]

    def look(self, query: Query) -> Found:
        """The rows of a page. An unknown split has none."""
        if query.split not in self.counts:
            return Found([], 0, 0, None)
        rows = Rows(self.folder / query.split, ())
        fitting = _fitting(rows.folder, replace(query, text="", at=0), self.config.data.max_length)
        picked, after = self._with_text(rows, fitting, query) if query.text else (
            [int(i) for i in fitting[query.at : query.at + PAGE]], query.at + PAGE,
        )  # fmt: skip
        return Found(
            [self._show(rows, query.split, i) for i in picked],
            len(fitting),
            len(rows),
            after if after < len(fitting) else None,
        )

    def _with_text(
        self, rows: Rows, fitting: NDArray[np.uint32], query: Query
    ) -> tuple[list[int], int]:
        words, until, picked, at = (
            query.text.lower().split(),
            time.monotonic() + _SECONDS,
            list[int](),
            query.at,
        )
        with (rows.folder / FILES["tokens"]).open(
            "rb"
        ) as file:  # of a map, rows far apart take whole pages each
            while at < len(fitting) and time.monotonic() < until:
                batch = [int(i) for i in fitting[at : at + _BATCH]]
                spans = [(4 * int(rows.offsets[i]), 4 * int(rows.offsets[i + 1])) for i in batch]
                found = [os.pread(file.fileno(), end - begin, begin) for begin, end in spans]
                ids = [np.frombuffer(content, "u4").tolist() for content in found]
                texts = self.tokenizer.backend.decode_batch(ids, skip_special_tokens=False)
                for place, text in enumerate(texts):
                    if all(word in text.lower() for word in words):
                        picked.append(batch[place])
                        if len(picked) == PAGE:
                            return picked, at + place + 1
                at += len(batch)
        return picked, at

    def _show(self, rows: Rows, split: str, index: int) -> dict[str, Any]:
        ids, trained = rows.row(index)
        images = [image.path for image in rows.images(index)] if self.config.sees else []
        second = int(rows.splits[index]) if rows.splits is not None else 0
        row = Picked(
            split, int(rows.source[index]), int(rows.record[index]), ids.tolist(), bytes(trained.view(np.uint8)),
            images, self._said(rows, index), second,
        )  # fmt: skip
        return shown(f"row {index + 1:,}", row, self.tokenizer, self.sources[split][row.source])

    def _said(self, rows: Rows, index: int) -> Sequence[str] | None:
        if self.labels is None or rows.targets is None:
            return None
        target = rows.targets[index]
        if self.labels.problem_type == "regression":
            return [f"{value:g}" for value in target]
        names = self.labels.names
        if self.labels.problem_type == "single_label_classification":
            return [names[int(target[0])]]
        return [name for name, value in zip(names, target, strict=True) if value > 0]


@lru_cache(maxsize=2)
def _fitting(split: Path, query: Query, limit: int) -> NDArray[np.uint32]:
    """Indexes of the rows that fit a query without a text, in its order."""
    rows = Rows(split, ())
    parts = [
        _fitting_part(rows, slice(at, at + _PART), query, limit)
        for at in range(0, len(rows), _PART)
    ]
    found: NDArray[np.uint32] = np.concatenate(parts) if parts else np.empty(0, np.uint32)
    if query.problem == "repeated":
        hashes = _hashes(split)[found]
        order = np.argsort(hashes, kind="stable").astype(np.uint32)
        hashes = hashes[order]
        same = hashes[1:] == hashes[:-1]
        found = found[order]
        repeats: NDArray[np.bool_] = np.concatenate([[False], same]) | np.concatenate(
            [same, [False]]
        )
        return found.compress(repeats)
    if query.order == "file":
        return found
    lengths = np.diff(rows.offsets).astype(np.uint32)[found]
    if query.order == "least":
        return found[
            np.argsort((rows.trained_counts[found] / lengths).astype(np.float32), kind="stable")
        ]
    if query.order == "longest":
        np.subtract(np.uint32(0xFFFFFFFF), lengths, out=lengths)
    return found[np.argsort(lengths, kind="stable")]


def _fitting_part(rows: Rows, part: slice, query: Query, limit: int) -> NDArray[np.uint32]:
    """The indexes in a part of the rows, in the order of the files: what this takes is as small as the part."""
    lengths = np.diff(rows.offsets[part.start : part.stop + 1])
    fits = lengths >= query.low
    if query.high is not None:
        fits &= lengths <= query.high
    if query.source is not None:
        fits &= rows.source[part] == query.source
    if query.problem == "limit":
        fits &= lengths >= limit
    elif query.problem == "little":
        fits &= rows.trained_counts[part] * 20 < lengths
    found: NDArray[np.uint32] = (np.flatnonzero(fits) + part.start).astype(np.uint32)
    return found


@lru_cache(maxsize=1)
def _hashes(split: Path) -> NDArray[np.uint64]:
    """A number for each row that equal rows share: a sum of its tokens, each times an odd number of its place."""
    offsets = Rows(split, ()).offsets
    found = np.zeros(len(offsets) - 1, np.uint64)
    with (split / FILES["tokens"]).open(
        "rb"
    ) as file:  # what is mapped would count as memory of the server
        for begin in range(0, len(found), _CHUNK):
            ends = offsets[begin : begin + _CHUNK + 1] - offsets[begin]
            tokens = np.fromfile(file, "u4", int(ends[-1]))
            if not len(tokens):
                continue
            places = np.arange(1, len(tokens) + 1, dtype=np.int64) - np.repeat(
                ends[:-1], np.diff(ends)
            )
            # Splitmix64's constants spread the places; unsigned numbers wrap around.
            mixed = places.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9) | np.uint64(
                1
            )
            found[begin : begin + _CHUNK] = np.add.reduceat(
                (tokens + np.uint64(1)) * mixed, ends[:-1]
            )
    return found


def open_rows(config: Config, fingerprint: str) -> Opened | None:
    """Return the prepared rows of this fingerprint, None where this machine has none that are whole."""
    cache = cache_folder(config.data.cache)
    folder = cache / "prepared" / fingerprint[:32]
    if not fingerprint or damage_of(folder, fingerprint, cache) is not None:
        return None
    return _opened(folder, json.dumps(resolved(config)), cache)


@lru_cache(maxsize=3)
def _opened(folder: Path, settings: str, cache: Path) -> Opened:
    config = load_resolved(json.loads(settings))
    tokenizer = load_tokenizer(config.model, cache, date=day_of(config))
    sources = split_sources(config)
    return Opened(
        folder,
        config,
        tokenizer,
        {split: [source.path for source in given] for split, given in sources.items()},
        {split: len(Rows(folder / split, ())) for split in sources},
        Labels.read(folder / LABELS) if (folder / LABELS).is_file() else None,
    )
