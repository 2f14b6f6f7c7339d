"""What a model answered in an evaluation, by the files that it leaves in `answers/`: what it still gets wrong, say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kubetune.reporting.point import RIGHT_OR_WRONG, point
from kubetune.reporting.reading import RunRecord
from kubetune.reporting.rendering import turns
from kubetune.rundir import metrics

_MOST_ROWS = 20_000  # that are read
_MOST_SHOWN = 6


@dataclass(frozen=True)
class Weakest:
    """The worst answers of a checkpoint by one metric."""

    metric: str
    # How many are wrong; None by a metric of which none is just right or wrong.
    wrong: int | None
    rows: int
    # Prompt, reference and answer of those that are shown, the worst first.
    lines: Sequence[dict[str, Any]]


def weakest(run: RunRecord) -> Weakest | None:
    """Return what the checkpoint that a user gets answers worst; None if all is right, or no answers are kept."""
    shown = point(run)
    if shown is None or not shown.step:
        return None
    answers = answers_of(run.path, shown.step)
    names = list(answers[0]["scores"]) if answers else []
    about = shown.name.removeprefix("eval_")
    # What the run is about, if answers are right or wrong by it, else what they are right or wrong by.
    of_choice = (
        *(name for name in RIGHT_OR_WRONG if name == about),
        *RIGHT_OR_WRONG,
        about,
        *names,
    )
    metric = next((name for name in of_choice if name in names), None)
    if metric is None:
        return None
    scored = [line for line in answers if metrics.is_number(line["scores"].get(metric))]
    scored.sort(key=lambda line: line["scores"][metric])
    wrong = None
    if metric in RIGHT_OR_WRONG:
        scored = [line for line in scored if line["scores"][metric] < 1]
        wrong = len(scored)
    if not scored:
        return None
    return Weakest(metric, wrong, len(answers), even(scored[:_MOST_SHOWN]))


def answers_so_far(run: RunRecord) -> list[tuple[str, str]]:
    """Return a question with its answer before training and after the last evaluation, that which gained most."""
    last = run.measurements[-1]["step"] if run.measurements else 0
    before = {line["prompt"]: line for line in answers_of(run.path, 0)}
    pairs = [
        (before[line["prompt"]], line)
        for line in (answers_of(run.path, last) if last else before.values())
        if line["prompt"] in before
    ]
    if not pairs:
        return []
    first, now = max(pairs, key=lambda pair: _sum(pair[1]) - _sum(pair[0]))
    spoken = turns(first["prompt"])
    asked = spoken[-1]["content"] if spoken else first["prompt"]
    labelled = [("asked", asked), ("before", first["answer"])]
    return [*labelled, ("now", now["answer"])] if last else labelled


def _sum(line: dict[str, Any]) -> float:
    """Return the scores of an answer together."""
    return sum(float(value) for value in line["scores"].values() if metrics.is_number(value))


def even(lines: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return an even number of lines, which fill their rows; a lone one stays."""
    return lines if len(lines) < 2 else lines[: len(lines) // 2 * 2]


def answers_of(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """Return the answers of the evaluation after a step, each with its question: prompt, reference, answer and scores.

    Return [] if none were kept. What is damaged is left out.
    """
    folder = run_dir / metrics.ANSWERS
    questions = {}
    for line in _lines(folder / "questions.jsonl"):
        if isinstance(line.get("prompt"), str) and isinstance(line.get("reference"), str):
            questions[str(line.get("row"))] = line
    answers = []
    for line in _lines(folder / f"step-{step:06d}.jsonl"):
        question = questions.get(str(line.get("row")))
        if (
            question
            and isinstance(line.get("answer"), str)
            and isinstance(line.get("scores"), dict)
        ):
            answers.append({**question, **line})
    return answers


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the first lines of a file, none if it is missing."""
    return list(islice(metrics.stream_lines(path, []), _MOST_ROWS))
