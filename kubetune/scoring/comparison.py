"""Two models on the same questions: each measure with its interval, what was gained and lost, and by chance or not.

The answers are those that evaluations left in run directories, so no model is needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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
    """One question and what a model answered; `scores` by measure."""

    prompt: str
    reference: str
    answer: str
    scores: Mapping[str, float]


@dataclass(frozen=True)
class Measured:
    """A measure of two models on `rows` questions, each value with its 95 % interval over the rows.

    BLEU and chrF are measured over all rows together, and so are their intervals; their tests are those of sentences.
    """

    metric: str
    rows: int
    before: float
    after: float
    before_interval: Interval
    after_interval: Interval
    paired: Comparison

    def facts(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            **{key: value for key, value in vars(self).items() if key != "paired"},
            **self.paired._asdict(),
        }


def answers_file(run_dir: Path, step: int) -> Path:
    """The file that an evaluation after `step` steps leaves the answers in."""
    return run_dir / metrics.ANSWERS / f"step-{step:06d}.jsonl"


def read_answers(run_dir: Path, step: int) -> list[Answered]:
    """Questions and answers of the evaluation after `step` steps. Raises ConfigError where none were kept."""
    path = answers_file(run_dir, step)
    if not path.is_file():
        raise errors.ConfigError(
            f"{run_dir} keeps no answers of step {step}; they are kept where the run file has evaluation.generate"
        )
    asked = {
        line["row"]: line for line in metrics.stream_lines(run_dir / metrics.ANSWERS / QUESTIONS)
    }
    return [
        Answered(
            asked[line["row"]]["prompt"],
            asked[line["row"]]["reference"],
            line["answer"],
            line["scores"],
        )
        for line in metrics.stream_lines(path)
        if line["row"] in asked
    ]


def compare_answers(before: Sequence[Answered], after: Sequence[Answered]) -> list[Measured]:
    """Every measure that both have, over the questions that both were asked.

    Raises ConfigError where they share no question, or no measure.
    """
    first = {(answered.prompt, answered.reference): answered for answered in before}
    pairs = [
        (first[key], other) for other in after if (key := (other.prompt, other.reference)) in first
    ]
    if not pairs:
        raise errors.ConfigError(
            "the two were not asked the same: no question with its reference is in both"
        )
    names = [name for name in pairs[0][1].scores if name in pairs[0][0].scores]
    if not names:
        raise errors.ConfigError(
            "the two were not measured the same: no metric of answers is in both"
        )
    return [_measured(name, pairs) for name in names]


def _measured(name: str, pairs: Sequence[tuple[Answered, Answered]]) -> Measured:
    references = [one.reference for one, _ in pairs]
    scores = [[answered.scores[name] for answered in side] for side in zip(*pairs, strict=True)]
    answers = [[answered.answer for answered in side] for side in zip(*pairs, strict=True)]
    sides = list(zip(scores, answers, strict=True))
    values = [of_all(name, own, said, references) for own, said in sides]
    intervals = [bounds(name, own, said, references) for own, said in sides]
    return Measured(
        name,
        len(pairs),
        values[0],
        values[1],
        intervals[0],
        intervals[1],
        compare(scores[0], scores[1]),
    )


def turned(
    before: Sequence[Answered], after: Sequence[Answered], name: str, most: int
) -> dict[str, list[Any]]:
    """Questions whose score a model gained and lost most by, at most so many of each."""
    first = {(answered.prompt, answered.reference): answered for answered in before}
    changes = [
        (
            other.scores[name] - first[key].scores[name],
            {**asdict(other), "before": first[key].answer},
        )
        for other in after
        if (key := (other.prompt, other.reference)) in first
    ]
    changes.sort(key=lambda change: change[0])
    lost = [facts for change, facts in changes[:most] if change < 0]
    return {
        "gained": [facts for change, facts in changes[: -most - 1 : -1] if change > 0],
        "lost": lost,
    }


def write_lines(path: Path, lines: Sequence[Mapping[str, Any]], run_dir: Path) -> None:
    """Write answers or questions, whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    write_atomic(
        path, "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines), within=run_dir
    )
