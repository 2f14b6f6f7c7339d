"""Compare two models on the same questions: measures with intervals, answers gained and lost, by chance or not.

The answers are those that evaluations left in run directories, so no model is needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base.files import write_atomic
from kubetune.rundir import metrics
from kubetune.scoring.metrics import bounds, of_all
from kubetune.scoring.statistics import Comparison, compare

QUESTIONS = "questions.jsonl"

Interval = tuple[float, float]


@dataclass(frozen=True)
class Answered:
    """One question and what a model answered."""

    row: int  # of the evaluation data
    prompt: str
    reference: str
    answer: str
    scores: Mapping[str, float]  # by metric

    @property
    def question(self) -> tuple[str, str]:
        """Return what must be equal for two models to have been asked the same."""
        return self.prompt, self.reference


@dataclass(frozen=True)
class Measured:
    """A measure of two models on the same questions."""

    metric: str
    rows: int  # questions
    before: float
    after: float
    before_interval: Interval  # 95 %, over the rows
    after_interval: Interval  # 95 %, over the rows
    # For BLEU and chrF, which are measured over all rows together, the test compares the scores of single rows.
    paired: Comparison

    def facts(self) -> dict[str, Any]:
        """Return the line of verdict.json."""
        # The test is next to the measures, not within them.
        facts = dict(vars(self))
        del facts["paired"]
        return facts | self.paired._asdict()


def answers_file(run_dir: Path, step: int) -> Path:
    """Return the file that an evaluation after `step` steps leaves the answers in."""
    return run_dir / metrics.ANSWERS / f"step-{step:06d}.jsonl"


def require_answers(run_dir: Path, step: int) -> None:
    """Raise ConfigError if the evaluation after `step` steps kept no answers."""
    if not answers_file(run_dir, step).is_file():
        raise errors.ConfigError(
            f"{run_dir} keeps no answers of step {step}; they are kept if the run file has evaluation.generate"
        )


def read_answers(run_dir: Path, step: int) -> list[Answered]:
    """Return the questions and answers of the evaluation after `step` steps. Raise ConfigError if none were kept."""
    require_answers(run_dir, step)

    # Questions are kept once, in a file of their own; each line of answers names its question by its row.
    questions = {}
    for question in metrics.stream_lines(run_dir / metrics.ANSWERS / QUESTIONS):
        questions[question["row"]] = question

    answers = []
    for line in metrics.stream_lines(answers_file(run_dir, step)):
        if line["row"] in questions:
            # Answers to a question that was lost cannot be compared.
            question = questions[line["row"]]
            answers.append(
                Answered(
                    question["row"],
                    question["prompt"],
                    question["reference"],
                    line["answer"],
                    line["scores"],
                )
            )

    return answers


def _pairs(
    before: Sequence[Answered], after: Sequence[Answered]
) -> list[tuple[Answered, Answered]]:
    """Return both models' answers to the questions that both were asked."""
    # By the question and not by its row: two runs may have different evaluation data, of which some are the same.
    first = _by_question(before)
    pairs = []
    for question, answers in _by_question(after).items():
        pairs += _matched(first.get(question, []), answers)
    return pairs


def _by_question(answers: Sequence[Answered]) -> dict[tuple[str, str], list[Answered]]:
    """Return the answers to each question. Records that differ in an image alone ask the same one."""
    by_question: dict[tuple[str, str], list[Answered]] = {}
    for answered in answers:
        by_question.setdefault(answered.question, []).append(answered)
    return by_question


def _matched(
    before: Sequence[Answered], after: Sequence[Answered]
) -> list[tuple[Answered, Answered]]:
    """Return pairs of answers to one question, each answer in one pair: those of the same row, the others in order."""
    #     before  rows 4 7 9      after  rows 7 9 12      →  7 7, 9 9, 4 12
    left = {answered.row: answered for answered in before}
    pairs = []
    others = []
    for answered in after:
        if answered.row in left:
            pairs.append((left.pop(answered.row), answered))
        else:
            others.append(answered)
    # One of both may have been asked more often.
    pairs += zip(left.values(), others, strict=False)
    return pairs


def compare_answers(before: Sequence[Answered], after: Sequence[Answered]) -> list[Measured]:
    """Compare every measure that both have, over the questions that both were asked.

    Raise ConfigError if they share no question, or no measure.
    """
    pairs = _pairs(before, after)
    if not pairs:
        raise errors.ConfigError(
            "the two were not asked the same: no question with its reference is in both"
        )

    # All questions of an evaluation have the same metrics.
    before_first, after_first = pairs[0]
    names = [name for name in after_first.scores if name in before_first.scores]
    if not names:
        raise errors.ConfigError(
            "the two were not measured the same: no metric of answers is in both"
        )

    return [_measured(name, pairs) for name in names]


def _measured(name: str, pairs: Sequence[tuple[Answered, Answered]]) -> Measured:
    """Compare one measure."""
    # Both columns have the questions in the same order, so that rows can be paired.
    first = _Column(name)
    second = _Column(name)
    for before, after in pairs:
        first.add(before)
        second.add(after)
    return Measured(
        metric=name,
        rows=len(pairs),
        before=first.value(),
        after=second.value(),
        before_interval=first.interval(),
        after_interval=second.interval(),
        paired=compare(first.scores, second.scores),
    )


@dataclass
class _Column:
    """The answers of one model and their scores by one metric, all in the order of the questions."""

    name: str  # of the metric
    scores: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    references: list[str] = field(default_factory=list)

    def add(self, answered: Answered) -> None:
        """Put an answer to the others."""
        self.scores.append(answered.scores[self.name])
        self.texts.append(answered.answer)
        self.references.append(answered.reference)

    def value(self) -> float:
        """Return the metric of all answers."""
        return of_all(self.name, self.scores, self.texts, self.references)

    def interval(self) -> Interval:
        """Return its 95 % interval."""
        return bounds(self.name, self.scores, self.texts, self.references)


def turned(
    before: Sequence[Answered],
    after: Sequence[Answered],
    name: str,
    most: int,
) -> dict[str, list[Any]]:
    """Return the questions with the largest gains and losses of a model, at most `most` of each."""
    changes = []
    for first, second in _pairs(before, after):
        facts = asdict(second) | {"before": first.answer}
        del facts["row"]
        changes.append((second.scores[name] - first.scores[name], facts))
    changes.sort(key=lambda change: change[0])

    # The largest losses come first, the largest gains last.
    lost = [facts for change, facts in changes[:most] if change < 0]
    gained = [facts for change, facts in changes[: -most - 1 : -1] if change > 0]
    return {"gained": gained, "lost": lost}


def write_lines(
    path: Path,
    lines: Sequence[Mapping[str, Any]],
    run_dir: Path,
) -> None:
    """Write answers or questions, whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    text = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
    write_atomic(path, text, within=run_dir)
