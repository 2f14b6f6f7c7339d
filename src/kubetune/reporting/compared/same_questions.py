"""What runs answered to the same questions at their best steps: which are right in one alone, and a paired test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kubetune.base.humanize import counted
from kubetune.reporting.look.metric_values import label_of
from kubetune.reporting.point import CERTAIN, RIGHT_OR_WRONG
from kubetune.reporting.point_details.kept_answers import answers_of, even
from kubetune.reporting.reading import RunRecord
from kubetune.rundir.intervals import mcnemar, p_in_words

_MOST_SHOWN = 6  # of a group

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Group:
    """Questions that the same runs answered right."""

    title: str
    count: int
    entries: Sequence[Mapping[str, Any]]  # the first of them, each with the answer of every run


@dataclass(frozen=True)
class SameQuestions:
    """The answers of runs to the questions that all of them were asked."""

    metric: str  # by which each is right or wrong: exact_match
    questions: Sequence[Sequence[Line]]  # of each the answer of every run

    def is_right(self, line: Line) -> bool:
        """True if an answer is right."""
        return bool(line["scores"][self.metric] == 1)

    @property
    def label(self) -> str:
        """What people call the metric."""
        return label_of(f"eval_{self.metric}")

    @property
    def alone(self) -> tuple[int, int]:
        """Of two runs, on how many questions the first alone is right, and the second alone."""
        right = [tuple(map(self.is_right, lines)) for lines in self.questions]
        return right.count((True, False)), right.count((False, True))

    @property
    def is_certain(self) -> bool:
        """True if two runs differ by more than chance."""
        return mcnemar(*self.alone) < CERTAIN

    @property
    def test(self) -> str:
        """The test of two runs in words."""
        p_value = p_in_words(mcnemar(*self.alone))
        return f"{p_value} by McNemar on {counted(len(self.questions), 'row')} that both answered"

    def groups(self, names: Sequence[str]) -> list[Group]:
        """Return the questions that some runs answered right and others wrong."""
        if len(names) > 2:
            outcomes = {"Right in some, wrong in others": set[tuple[bool, ...]]()}
        else:
            outcomes = {
                f"Right in {names[0]} alone": {(True, False)},
                f"Right in {names[1]} alone": {(False, True)},
            }
        shown = []
        for title, wanted in outcomes.items():
            entries = []
            for lines in self.questions:
                right = tuple(map(self.is_right, lines))
                if right in wanted or (not wanted and len(set(right)) > 1):
                    first = lines[0]
                    request = {"prompt": first["prompt"], "expected": first["reference"]}
                    answers = [line["answer"] for line in lines]
                    entries.append({"request": request, "answers": answers})
            if entries:
                shown.append(Group(title, len(entries), even(entries[:_MOST_SHOWN])))
        return shown


def same_questions(runs: Sequence[RunRecord]) -> SameQuestions | None:
    """Return what these runs answered to the same questions, None if they have none that are just right or wrong."""
    of_runs = []
    for run in runs:
        answers = answers_of(run.path, int((run.of_best or {}).get("step") or 0))
        # Records that differ in an image alone ask the same, so that the row counts too.
        of_runs.append({(line["row"], line["prompt"], line["reference"]): line for line in answers})
    shared = [key for key in of_runs[0] if all(key in answers for answers in of_runs)]
    questions = [[answers[key] for answers in of_runs] for key in shared]
    for metric in RIGHT_OR_WRONG:
        scores = [line["scores"].get(metric) for lines in questions for line in lines]
        if scores and all(score in (0, 1) for score in scores):
            return SameQuestions(metric, questions)
    return None
