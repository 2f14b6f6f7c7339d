"""Looks at all data of a run before anything is spent on it: what is bad, what would be left out, what is trained.

Holds no rows and writes nothing. Showing a report is cli/prepare/data.py's work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final

from kubetune.config.schema import Config, EvaluationConfig, RecordKind, TrainingConfig
from kubetune.data.findings.finding import Finding
from kubetune.data.findings.references import (
    References,
    read_in_part,
    unanswered,
    without_answers,
)
from kubetune.data.findings.reward_columns import without_columns
from kubetune.data.findings.sentences import BAD_RECORDS, find
from kubetune.data.findings.teacher_texts import of_distillation
from kubetune.data.inspect.gallery import Gallery, brief
from kubetune.data.inspect.saved_share import saved_share
from kubetune.data.prepared.data_pass import DataPass
from kubetune.data.prepared.fingerprint import with_files_not_read
from kubetune.data.prepared.pipeline import BatchResult
from kubetune.data.prepared.profile import LIMITS, Profile
from kubetune.data.prepared.row_watch import labels_of
from kubetune.data.prepared.row_writer import Chunk
from kubetune.data.reading.record_problems import SHOWN, Problems
from kubetune.data.reading.strict_json import JsonObject
from kubetune.data.spec import DataSpec, Split
from kubetune.data.text.class_labels import Labels
from kubetune.data.text.tokenizer import Tokenizer

# So many rows are looked at, to see how many tokens they share.
SHARING_ROWS: Final = 512

# A rendered sequence in pieces, each with whether it is trained.
Sample = list[tuple[str, bool]]


# Called with a number of records.
Count = Callable[[int], None]


@dataclass
class Report:
    """BatchResult of a check."""

    findings: tuple[Finding, ...] = ()
    problems: Problems = field(default_factory=Problems)
    stats: dict[Split, JsonObject] = field(default_factory=dict)  # those of prepared data
    lengths: dict[Split, Counter[int]] = field(default_factory=dict)  # rows by token count
    labels: Labels | None = None  # of a classifier
    profiles: dict[Split, Profile] = field(default_factory=dict)  # for a page alone
    samples: list[Sample] = field(default_factory=list)
    # chosen, rejected, good, bad, right, none, or empty
    sample_answers: list[str] = field(default_factory=list)
    date: str = ""  # given to chat templates that ask for today's date
    saved_share: float = 0.0  # share of the tokens of the first rows that shared beginnings save

    @property
    def draws_answers(self) -> bool:
        """True if answers to the rows are drawn, so that nothing of a row itself is trained."""
        return not {"right", "none"}.isdisjoint(self.sample_answers)

    @property
    def ok(self) -> bool:
        """True if training could begin."""
        return self.verdict == "ok"

    @property
    def verdict(self) -> str:
        """Return what keeps training from beginning, or `ok`."""
        for finding in self.findings:
            if finding.severity == "error":
                return finding.sentence
        return "ok"

    @property
    def named_findings(self) -> tuple[Finding, ...]:
        """The findings, with the lines of bad records in place of their number."""
        named: list[Finding] = []
        for finding in self.findings:
            sentences = self.problems.sentences() if finding.id == BAD_RECORDS else []
            for sentence in sentences[:SHOWN]:
                named.append(replace(finding, sentence=sentence, places=(), advice=""))
            if not sentences:
                named.append(finding)
        # Each split counts its own bad records; their lines are of all splits.
        return tuple(dict.fromkeys(named))

    @property
    def errors(self) -> tuple[str, ...]:
        """The reasons why training cannot begin, as sentences, each once."""
        lines = [finding.line for finding in self.named_findings if finding.severity == "error"]
        return tuple(dict.fromkeys(lines))

    def count(self, result: BatchResult) -> None:
        """Add the lengths of a batch of rows, and their profile where there is one."""
        self.lengths.setdefault(result.split, Counter()).update(result.lengths)
        if result.profile is not None:
            # Processes profile their own batches; here these are added up.
            empty = Profile(result.profile.limits)
            self.profiles.setdefault(result.split, empty).add(result.profile)

    def to_json(self) -> JsonObject:
        """Return the report as JSON-able data."""
        splits = {}
        for split, stats in self.stats.items():
            splits[split] = stats | {"length_histogram": dict(histogram(self.lengths[split]))}
        samples = []
        for sample in self.samples:
            samples.append([{"text": text, "trained": trained} for text, trained in sample])
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "date": self.date,
            "saved_share": self.saved_share,
            "findings": [finding.to_json() for finding in self.findings],
            "problems": {"total": self.problems.total, "first": self.problems.first},
            "splits": splits,
            "sample_answers": self.sample_answers,
            "samples": samples,
        }


def check(
    config: Config,
    tokenizer: Tokenizer,
    samples: int = 0,
    *,
    keep: int | None = SHOWN,
    gallery: Gallery | None = None,
    count: Count = lambda done: None,
) -> Report:
    """Encode all data as `prepare` would and return what would come of it.

    `samples` rows are rendered for show; `keep` problems are kept, None for all. A `gallery` picks rows for a page.
    `count` is called with the number of records done.
    """
    # Only a page shows what other limits of length would leave of the rows.
    limits = LIMITS if gallery is not None else ()
    data_pass = DataPass(DataSpec.of(config), tokenizer, Problems(keep), limits=limits)

    report = Report(problems=data_pass.problems, labels=data_pass.labels)
    if tokenizer.writes_date:
        report.date = tokenizer.date or ""
    report.lengths = {split: Counter() for split in data_pass.sources}

    references = References(config.evaluation.generate, tokenizer)
    unanswered_rows: Counter[Split] = Counter()  # prompts, by split
    first_rows: list[list[list[int]]] = []  # of training, the ids of each row's sequences
    for result in _counted(data_pass.results(), count):
        report.count(result)
        if gallery is not None:
            gallery.add(result, report.labels)

        if config.record_kind == "prompt":
            # A row without a right answer has the end of one, for a label.
            unanswered_rows[result.split] += result.chunk.labels.count(1)

        # Read by one of the two at most, since a batch is of one split.
        rows = _rows(result.chunk, config.record_kind)
        if result.split == "eval" and not references.is_complete:
            for row in rows:
                references.add(row[0].ids, row[0].trained, row[0].answer)
        if result.split == "train" and len(first_rows) < max(samples, SHARING_ROWS):
            labels = labels_of(report.labels, result.chunk)
            for row, names in zip(rows, labels, strict=True):
                if len(first_rows) < samples:
                    _show(report, tokenizer, row, names)
                first_rows.append([sequence.ids for sequence in row])

    first_rows = first_rows[:SHARING_ROWS]
    report.saved_share = saved_share(
        first_rows, config.task, config.data, config.preference, config.training
    )
    _judge(report, data_pass, references, unanswered_rows, config.evaluation, config.training)
    return report


def _judge(
    report: Report,
    data_pass: DataPass,
    references: References,
    unanswered_rows: Mapping[Split, int],
    evaluation: EvaluationConfig,
    training: TrainingConfig,
) -> None:
    """Put the counts of a pass that is over to the report, and what they mean."""
    spec = data_pass.spec
    stats = data_pass.stats()
    report.stats = with_files_not_read(spec.sources, stats, images=data_pass.has_images)
    report.findings = find(spec, report.stats, data_pass.tokenizer)
    # Where records are bad, fixing them may change the references.
    if report.ok:
        answers = unanswered(spec.data.train, spec.rewards, spec.seed)
        columns = without_columns(spec.data.train, spec.rewards, spec.seed)
        rows = {split: lengths.total() for split, lengths in report.lengths.items()}
        asked = without_answers(
            rows.get("eval", 0),
            unanswered_rows["eval"],
            evaluation,
            training.metric_for_best_model,
        )
        taught = of_distillation(spec, rows["train"], unanswered_rows["train"])
        report.findings = (
            *references.findings(),
            *asked,
            *answers,
            *columns,
            *taught,
            *references.warnings(),
            *read_in_part(spec.data.train, spec.rewards, spec.seed),
            *report.findings,
        )


def _counted(results: Iterator[BatchResult], count: Count) -> Iterator[BatchResult]:
    """Yield the results, and call `count` with the number of records that they hold so far."""
    done = 0
    for result in results:
        done += result.tally.records
        count(done)
        yield result


def _show(
    report: Report,
    tokenizer: Tokenizer,
    row: Sequence[_Sequence],
    names: Sequence[str],
) -> None:
    """Put a row to the samples of a report. `names`: its labels, in words."""
    for sequence in row:
        report.samples.append(_sample(tokenizer, sequence, names))
        report.sample_answers.append(sequence.answer)


@dataclass(frozen=True)
class _Sequence:
    """One sequence of a row; a pair of answers has two."""

    # chosen, rejected, good or bad; right or none after a prompt; empty for a row that is no such answer
    answer: str
    ids: list[int]
    trained: bytes  # a 1 for each id that is trained, else a 0


def _rows(chunk: Chunk, kind: RecordKind) -> Iterator[list[_Sequence]]:
    """Yield the sequences of each row."""
    for number, row in enumerate(chunk.sequences()):
        answers = ["chosen", "rejected"]
        if len(row) == 1:
            answers = [_answer(chunk, number, kind)]
        yield [_Sequence(answer, *of_row) for answer, of_row in zip(answers, row, strict=True)]


def _answer(chunk: Chunk, number: int, kind: RecordKind) -> str:
    """Return what the answer of a row is, as `_Sequence` has it."""
    if kind == "judged":
        return "good" if chunk.targets[number] else "bad"
    if kind == "prompt":
        # A row without a right answer has the end of one, for a label.
        return "none" if chunk.labels[number] == 1 else "right"
    return ""


def _sample(tokenizer: Tokenizer, sequence: _Sequence, names: Sequence[str]) -> Sample:
    """Return a sequence as text, cut wherever training begins or ends. Its labels follow it, as if trained."""
    pieces: Sample = []
    begin = 0
    for is_trained, run in groupby(sequence.trained):
        end = begin + len(list(run))
        text = tokenizer.decode(sequence.ids[begin:end], skip_special_tokens=False)
        pieces.append((brief(text), bool(is_trained)))
        begin = end

    for name in names:
        pieces.append((" ", False))
        pieces.append((name, True))
    return pieces


def histogram(lengths: Counter[int]) -> Iterator[tuple[str, int]]:
    """Yield rows by length in tokens, in steps that double: ("65–128", 17)."""
    longest = max(lengths, default=0)
    begin = 0
    end = 32
    while begin < longest:
        rows = 0
        for length, count in lengths.items():
            if begin < length <= end:
                rows += count
        # Steps without rows are shown too, as gaps.
        yield f"{begin + 1}–{end}", rows
        begin = end
        end *= 2
