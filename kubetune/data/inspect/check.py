"""Looks at all data of a run before anything is spent on it: what is bad, what would be left out, what is trained.

Holds no rows and writes nothing. Showing a report is cli/prepare/data.py's work.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby, islice
from typing import Any

from kubetune.config.schema import Config, RecordKind, SourceConfig
from kubetune.data.findings.finding import Finding
from kubetune.data.findings.look_through import LookThrough, with_files_not_read
from kubetune.data.findings.row_watch import labels_of
from kubetune.data.findings.sentences import find
from kubetune.data.inspect.gallery import Gallery, brief
from kubetune.data.inspect.sharing import spared_share
from kubetune.data.prepared.pipeline import Split, Worker
from kubetune.data.prepared.profile import LIMITS, Profile
from kubetune.data.prepared.row_writer import Chunk
from kubetune.data.reading.formats import images_of, read
from kubetune.data.reading.images import ADDRESS, image_of_row
from kubetune.data.reading.messages import OF_TEMPLATES
from kubetune.data.reading.preferences import likely_kind
from kubetune.data.reading.problems import SHOWN, Problems
from kubetune.data.reading.sources import read_source
from kubetune.data.reading.splits import split_sources
from kubetune.data.text.encode_labelled import within_positions
from kubetune.data.text.labels import Labels, find_labels
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.data.vision.image_processor import load_image_processor

SHARING_ROWS = 512
"""Rows that are looked at, to see how many tokens they share."""

Sample = list[tuple[str, bool]]
"""A rendered sequence in pieces, each with whether it is trained."""

Answer = tuple[str, list[int], bytes]
"""A sequence with its name, such as `chosen`, if it has one."""


@dataclass
class Report:
    """Result of a check. `stats` are those that prepared data keep, by split."""

    findings: tuple[Finding, ...] = ()
    problems: Problems = field(default_factory=Problems)
    stats: dict[Split, dict[str, Any]] = field(default_factory=dict)
    lengths: dict[Split, Counter[int]] = field(default_factory=dict)  # rows by token count
    labels: Labels | None = None  # of a classifier
    profiles: dict[Split, Profile] = field(default_factory=dict)  # for a page alone
    samples: list[Sample] = field(default_factory=list)
    sample_answers: list[str] = field(default_factory=list)  # chosen, rejected, good, bad, or empty
    date: str = ""  # what a chat template is told that asks for today's
    spared: float = 0.0  # share of the tokens of the first rows that shared beginnings save

    @property
    def ok(self) -> bool:
        """True if training could begin."""
        return self.verdict == "ok"

    @property
    def verdict(self) -> str:
        """Return what keeps training from beginning, or `ok`."""
        errors = [finding for finding in self.findings if finding.severity == "error"]
        return errors[0].sentence if errors else "ok"

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-able data."""
        splits = {
            split: stats | {"length_histogram": dict(histogram(self.lengths[split]))}
            for split, stats in self.stats.items()
        }
        problems = {"total": self.problems.total, "first": self.problems.first}
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "date": self.date,
            "spared_share": self.spared,
            "findings": [finding.to_json() for finding in self.findings],
            "problems": problems,
            "splits": splits,
            "sample_answers": self.sample_answers,
            "samples": [
                [{"text": text, "trained": trained} for text, trained in sample]
                for sample in self.samples
            ],
        }


def check(
    config: Config,
    tokenizer: Tokenizer,
    samples: int = 0,
    *,
    keep: int | None = SHOWN,
    gallery: Gallery | None = None,
) -> Report:
    """Encode all data as `prepare` would and return what would come of it.

    `samples` rows are rendered for show; `keep` problems are kept, None for all. A `gallery` picks rows for a page.
    """
    report = Report(
        problems=Problems(keep),
        labels=find_labels(config),
        date=(tokenizer.date or "") if tokenizer.writes_date else "",
    )
    if report.labels is not None:
        config = within_positions(config, tokenizer)
    sources = split_sources(config)
    report.lengths = {split: Counter() for split in sources}
    limits = tuple(sorted({*LIMITS, config.data.max_length})) if gallery is not None else ()
    images = load_image_processor(config, tokenizer)
    worker = Worker(
        tokenizer, config.data, sources, report.labels, images, limits, config.record_kind
    )
    looked = LookThrough(config, worker, sources, report.labels, report.problems)
    first: list[list[list[int]]] = []
    for result in looked.results():
        report.lengths[result.split].update(result.lengths)
        if result.profile is not None:
            report.profiles.setdefault(result.split, Profile(limits)).add(result.profile)
        names = list(labels_of(report.labels, result.chunk))
        if gallery is not None:
            gallery.add(result, names if report.labels is not None else [None] * len(names))
        if result.split == "train":
            _keep_first(first, _answers(result.chunk, config.record_kind))
            answers = _answers(result.chunk, config.record_kind)
            _show(report, tokenizer, zip(answers, names, strict=True), samples)
    report.stats = with_files_not_read(config, looked.stats(), images=images is not None)
    report.findings = find(config, report.stats, tokenizer)
    report.spared = spared_share(config, first)
    return report


def _keep_first(first: list[list[list[int]]], rows: Iterable[list[Answer]]) -> None:
    first += [[ids for _, ids, _ in row] for row in islice(rows, SHARING_ROWS - len(first))]


def check_shapes(
    source: SourceConfig, *, keep: int | None = SHOWN
) -> tuple[Problems, Counter[str], Counter[str], Counter[str]]:
    """Read and convert all records of a source, without a tokenizer.

    Returns the problems, how many are of each kind, how many hold which key that nothing reads, and in how many keys
    were taken as something that their names alone do not say.

    Images are only looked for; `with images that are not there` is counted as a kind.
    """
    problems = Problems(keep)
    kinds, unused, readings = Counter[str](), Counter[str](), Counter[str]()
    there = lru_cache(maxsize=4096)(os.path.isfile)
    for record in read_source(source, problems):
        try:
            example, keys, taken = read(
                record.value, source.format, source.columns, kind=likely_kind(record.value)
            )
        except ValueError as error:
            problems.add(record.where, str(error))
            continue
        unused.update(key for key in keys if key not in OF_TEMPLATES)
        if taken:
            readings[taken] += 1
        kind = type(example).__name__
        if images := images_of(example):
            found = all(
                path.startswith(ADDRESS) or there(image_of_row(record.file, path))
                for path in images
            )
            kind += " with images" if found else " with images that are not there"
        kinds[kind] += 1
    return problems, kinds, unused, readings


def _rows(chunk: Chunk) -> Iterator[tuple[list[int], bytes]]:
    end = 0
    for length in chunk.lengths:
        begin, end = end, end + length
        yield chunk.tokens[begin:end].tolist(), bytes(chunk.trained[begin:end])


def _show(
    report: Report,
    tokenizer: Tokenizer,
    rows: Iterable[tuple[list[Answer], list[str]]],
    samples: int,
) -> None:
    """Render rows until the report has enough of them."""
    for sequences, said in islice(
        rows, samples - len(report.samples) + report.sample_answers.count("rejected")
    ):
        report.samples += [_sample(tokenizer, ids, trained, said) for _, ids, trained in sequences]
        report.sample_answers += [name for name, _, _ in sequences]


def _answers(chunk: Chunk, kind: RecordKind) -> Iterator[list[Answer]]:
    """The sequences of each row, each with the answer that it is, if it is one of those compared or judged."""
    for number, (ids, trained) in enumerate(_rows(chunk)):
        if split := chunk.splits[number]:
            yield [
                ("chosen", ids[:split], trained[:split]),
                ("rejected", ids[split:], trained[split:]),
            ]
        else:
            yield [
                (
                    ("bad", "good")[int(chunk.targets[number])] if kind == "judged" else "",
                    ids,
                    trained,
                )
            ]


def _sample(tokenizer: Tokenizer, ids: list[int], trained: bytes, names: list[str]) -> Sample:
    pairs = groupby(zip(ids, trained, strict=True), key=lambda pair: bool(pair[1]))
    text = [
        (brief(tokenizer.decode([id for id, _ in run], skip_special_tokens=False)), flag)
        for flag, run in pairs
    ]
    return [*text, *(piece for name in names for piece in ((" ", False), (name, True)))]


def histogram(lengths: Counter[int]) -> Iterator[tuple[str, int]]:
    """Rows by length in tokens, in steps that double: ("65–128", 17)."""
    begin, end = 0, 32
    while begin < max(lengths, default=0):
        yield (
            f"{begin + 1}–{end}",
            sum(count for length, count in lengths.items() if begin < length <= end),
        )
        begin, end = end, end * 2
