"""Looks at all data of a run before anything is spent on it: what is bad, what would be left out, what is trained.

Holds no rows and writes nothing. Showing a report is cli/prepare/data.py's work.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, groupby, islice
from typing import Any

from kubetune.base.humanize import counted
from kubetune.config.schema import Config, RecordKind, SourceConfig
from kubetune.data.inspect.gallery import Gallery, brief
from kubetune.data.inspect.sharing import spared_share
from kubetune.data.prepared.pipeline import Split, Tally, Worker, encode_batches
from kubetune.data.prepared.profile import LIMITS, Profile
from kubetune.data.prepared.row_writer import Chunk
from kubetune.data.reading.formats import images_of, read
from kubetune.data.reading.images import ADDRESS, image_of_row
from kubetune.data.reading.messages import OF_TEMPLATES
from kubetune.data.reading.preferences import likely_kind
from kubetune.data.reading.problems import SHOWN, Problems
from kubetune.data.reading.sources import evaluated_rows, not_read, read_source
from kubetune.data.reading.splits import answers, changes, plan_batches, require_rows, split_sources, summarise
from kubetune.data.text.encode_labelled import within_positions
from kubetune.data.text.labels import Labels, find_labels
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.data.vision.image_processor import load_image_processor
from kubetune.errors import DataError
from kubetune.planning.base_model import embeddings_of, positions_of

SHARING_ROWS = 512
"""Rows that are looked at, to see how many tokens they share."""

Sample = list[tuple[str, bool]]
"""A rendered sequence in pieces, each with whether it is trained."""

Answer = tuple[str, list[int], bytes]
"""A sequence with its name, such as `chosen`, if it has one."""


@dataclass
class Report:
    """Findings of a check. `stats` are those of prepared data; `lengths` count rows by token count.

    `sample_answers`: chosen, rejected, good or bad, of each of `samples`, or nothing. Of the rows of eval, `evaluated`
    are taken. `labels` are a classifier's, and `classes` count the rows of each; `profiles` are there for a page.
    `positions` says what becomes of rows that are longer than the model has positions. `date` is what the chat template
    is told that asks for today's. `spared`: of the tokens of the first
    rows, the share in beginnings that rows share, which are computed once. `files_not_read`: files by their kinds
    that lie in folders of data, and are no records.
    """

    problems: Problems = field(default_factory=Problems)
    stats: dict[Split, dict[str, Any]] = field(default_factory=dict)
    lengths: dict[Split, Counter[int]] = field(default_factory=dict)
    labels: Labels | None = None
    classes: dict[Split, Counter[str]] = field(default_factory=dict)
    profiles: dict[Split, Profile] = field(default_factory=dict)
    duplicates: dict[Split, int] = field(default_factory=dict)
    leaked: int = 0
    evaluated: int = 0
    samples: list[Sample] = field(default_factory=list)
    sample_answers: list[str] = field(default_factory=list)
    positions: str = ""
    date: str = ""
    spared: float = 0.0
    files_not_read: Counter[str] = field(default_factory=Counter)
    verdict: str = "ok"

    @property
    def ok(self) -> bool:
        """Training could begin: nothing that was found would stop it."""
        return self.verdict == "ok"

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-able data."""
        splits = {
            split: stats
            | {"duplicates": self.duplicates[split], "length_histogram": dict(histogram(self.lengths[split]))}
            | {"changes": [*changes(stats), *answers(stats)]}
            | ({"classes": dict(self.classes[split])} if split in self.classes else {})
            for split, stats in self.stats.items()
        }
        problems = {"total": self.problems.total, "first": self.problems.first}
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "positions": self.positions,
            "date": self.date,
            "spared_share": self.spared,
            "files_not_read": dict(self.files_not_read),
            "problems": problems,
            "splits": splits,
            "eval_rows_also_in_train": self.leaked,
            "eval_rows_evaluated": self.evaluated,
            "sample_answers": self.sample_answers,
            "samples": [[{"text": text, "trained": trained} for text, trained in sample] for sample in self.samples],
        }


def check(
    config: Config,
    tokenizer: Tokenizer,
    samples: int = 0,
    *,
    keep: int | None = SHOWN,
    gallery: Gallery | None = None,
) -> Report:
    """Encode all data as `prepare` would and say what would come of it.

    `samples` rows are rendered for show; `keep` problems are kept, None for all. A `gallery` picks rows for a page.
    """
    report = Report(Problems(keep), date=(tokenizer.date or "") if tokenizer.writes_date else "")
    sources = split_sources(config)
    tallies = {split: [Tally() for _ in given] for split, given in sources.items()}
    report.lengths = {split: Counter() for split in sources}
    seen: dict[Split, Counter[int]] = {split: Counter() for split in sources}
    report.labels = find_labels(config)
    if report.labels is not None:
        config = within_positions(config, tokenizer)
    if report.labels is not None and report.labels.problem_type != "regression":
        report.classes = {split: Counter(dict.fromkeys(report.labels.names, 0)) for split in sources}
    limits = tuple(sorted({*LIMITS, config.data.max_length})) if gallery is not None else ()
    images = load_image_processor(config, tokenizer)
    report.files_not_read = not_read(chain(*config.sources.values()), images=images is not None)
    worker = Worker(tokenizer, config.data, sources, report.labels, images, limits, config.record_kind)
    batches = plan_batches(config, report.problems, tallies)
    embeddings, largest, holding = embeddings_of(config, os.environ), -1, 0
    first: list[list[list[int]]] = []
    for result in encode_batches(worker, batches, report.problems, config.data.num_proc):
        tallies[result.split][result.source].add(result.tally)
        report.lengths[result.split].update(result.lengths)
        if result.profile is not None:
            report.profiles.setdefault(result.split, Profile(limits)).add(result.profile)
        if embeddings is not None:
            found = [max(ids, default=-1) for ids, _ in _rows(result.chunk)]
            largest, holding = max(largest, *found, -1), holding + sum(id >= embeddings.known for id in found)
        digests = list(_digests(result.chunk))
        seen[result.split].update(digests)
        said = list(_said(report.labels, result.chunk))
        if result.split in report.classes:
            report.classes[result.split].update(name for names in said for name in names)
        if gallery is not None:
            gallery.add(result, digests, said if report.labels is not None else [None] * len(digests))
        if result.split == "train":
            _keep_first(first, _answers(result.chunk, config.record_kind))
            _show(report, tokenizer, zip(_answers(result.chunk, config.record_kind), said, strict=True), samples)
    report.stats = {split: summarise(sources[split], given) for split, given in tallies.items()}
    report.duplicates = {split: counts.total() - len(counts) for split, counts in seen.items()}
    if "eval" in seen:
        rows, weights = [tally.rows for tally in tallies["eval"]], [source.weight for source in sources["eval"]]
        report.evaluated, report.leaked = sum(evaluated_rows(rows, weights)), _leaked(seen)
    report.verdict = _verdict(config, report)
    if report.ok and embeddings is not None and largest >= embeddings.known:
        total = sum(stats["rows"] for stats in report.stats.values())
        token = tokenizer.decode([largest], skip_special_tokens=False)
        report.verdict = embeddings.say(largest, token, f"{holding:,} of {counted(total, 'row')}")
    _compare_positions(report, config)
    report.spared = spared_share(config, first)
    return report


def _leaked(seen: dict[Split, Counter[int]]) -> int:
    return sum(number for digest, number in seen["eval"].items() if digest in seen["train"])


def _keep_first(first: list[list[list[int]]], rows: Iterable[list[Answer]]) -> None:
    first += [[ids for _, ids, _ in row] for row in islice(rows, SHARING_ROWS - len(first))]


def _compare_positions(report: Report, config: Config) -> None:
    """Note in the report where the longest row that is trained has more tokens than the model has positions."""
    positions, limit = positions_of(config, os.environ), config.data.max_length
    cuts = config.data.overlong in ("truncate", "split")
    found = [length for lengths in report.lengths.values() for length in lengths]
    longest = max((min(length, limit) for length in found if cuts or length <= limit), default=0)
    if positions is None or longest <= positions.limit:
        return
    report.positions = positions.say(longest)
    if report.ok and positions.is_table:
        report.verdict = report.positions


def _verdict(config: Config, report: Report) -> str:
    if report.problems.total:
        return counted(report.problems.total, "bad record")
    try:
        for split, stats in report.stats.items():
            require_rows(config, split, stats)
    except DataError as error:
        return str(error)
    return "ok"


def check_shapes(source: SourceConfig, *, keep: int | None = SHOWN) -> tuple[Problems, Counter[str], Counter[str]]:
    """Read and convert all records of a source, without a tokenizer: the problems, how many are of each kind, and how
    many hold which key that nothing reads.

    Images are only looked for; `with images that are not there` is counted as a kind.
    """
    problems, kinds, unused = Problems(keep), Counter[str](), Counter[str]()
    there = lru_cache(maxsize=4096)(os.path.isfile)
    for record in read_source(source, problems):
        try:
            example, keys = read(record.value, source.format, source.columns, kind=likely_kind(record.value))
        except ValueError as error:
            problems.add(record.where, str(error))
            continue
        unused.update(key for key in keys if key not in OF_TEMPLATES)
        kind = type(example).__name__
        if images := images_of(example):
            found = all(path.startswith(ADDRESS) or there(image_of_row(record.file, path)) for path in images)
            kind += " with images" if found else " with images that are not there"
        kinds[kind] += 1
    return problems, kinds, unused


def _rows(chunk: Chunk) -> Iterator[tuple[list[int], bytes]]:
    end = 0
    for length in chunk.lengths:
        begin, end = end, end + length
        yield chunk.tokens[begin:end].tolist(), bytes(chunk.trained[begin:end])


def _show(report: Report, tokenizer: Tokenizer, rows: Iterable[tuple[list[Answer], list[str]]], samples: int) -> None:
    """Render rows until the report has enough of them."""
    for sequences, said in islice(rows, samples - len(report.samples) + report.sample_answers.count("rejected")):
        report.samples += [_sample(tokenizer, ids, trained, said) for _, ids, trained in sequences]
        report.sample_answers += [name for name, _, _ in sequences]


def _answers(chunk: Chunk, kind: RecordKind) -> Iterator[list[Answer]]:
    """The sequences of each row, each with the answer that it is, if it is one of those compared or judged."""
    for number, (ids, trained) in enumerate(_rows(chunk)):
        if split := chunk.splits[number]:
            yield [("chosen", ids[:split], trained[:split]), ("rejected", ids[split:], trained[split:])]
        else:
            yield [(("bad", "good")[int(chunk.targets[number])] if kind == "judged" else "", ids, trained)]


def _said(labels: Labels | None, chunk: Chunk) -> Iterator[list[str]]:
    """The answer that each row is to get: names of classes, or a number. Nothing where tokens are the labels."""
    width = len(chunk.targets) // max(1, len(chunk.lengths))
    for row in range(len(chunk.lengths)):
        if labels is None:
            yield []
            continue
        name = labels.name(chunk.targets[row * width : (row + 1) * width])
        yield name if isinstance(name, list) else [name if isinstance(name, str) else f"{name:g}"]


def _digests(chunk: Chunk) -> Iterator[int]:
    """A number for each row that equal rows share: 64 bits, so that sets of them stay small."""
    end, stream = 0, memoryview(chunk.tokens).cast("B")
    for length, images in zip(chunk.lengths, chunk.images, strict=True):
        begin, end = end, end + 4 * length
        digest = hashlib.blake2b(stream[begin:end], digest_size=8)
        for image in images:
            digest.update(image.crc.to_bytes(4))
        yield int.from_bytes(digest.digest())


def _sample(tokenizer: Tokenizer, ids: list[int], trained: bytes, names: list[str]) -> Sample:
    pairs = groupby(zip(ids, trained, strict=True), key=lambda pair: bool(pair[1]))
    text = [(brief(tokenizer.decode([id for id, _ in run], skip_special_tokens=False)), flag) for flag, run in pairs]
    return [*text, *(piece for name in names for piece in ((" ", False), (name, True)))]


def histogram(lengths: Counter[int]) -> Iterator[tuple[str, int]]:
    """Rows by length in tokens, in steps that double: ("65–128", 17)."""
    begin, end = 0, 32
    while begin < max(lengths, default=0):
        yield f"{begin + 1}–{end}", sum(count for length, count in lengths.items() if begin < length <= end)
        begin, end = end, end * 2
