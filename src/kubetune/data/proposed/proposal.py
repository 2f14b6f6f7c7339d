"""A run that is proposed for data, with a reason for each choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kubetune.config.schema import RecordKind
from kubetune.data.reading.record import Record


class ReasonedChoice(NamedTuple):
    """A setting that was chosen, and the reason for it."""

    value: Any
    reason: str


def values_of(choices: Mapping[str, ReasonedChoice]) -> dict[str, Any]:
    """Return choices without their reasons."""
    return {key: choice.value for key, choice in choices.items()}


class Compared(NamedTuple):
    """Answers of the data, with which an evaluation compares those of the model."""

    metric: ReasonedChoice
    texts: Sequence[str]  # with the thoughts before them


@dataclass
class Proposal:
    """A run that data are for."""

    path: str
    task: ReasonedChoice
    kind: RecordKind
    records: Sequence[Record]  # those that were looked at
    loss: ReasonedChoice | None = None  # `preference.loss`, where it is not the default
    images: ReasonedChoice | None = None  # `preference.images`, where there are some
    reward: ReasonedChoice | None = None  # `rewards`, of prompts
    # `classification.problem_type`, if labels are numbers to predict.
    problem_type: ReasonedChoice | None = None
    format: ReasonedChoice | None = None  # None: it is recognised
    columns: dict[str, ReasonedChoice] = field(default_factory=dict)
    rows: int | None = None
    plain_prompts: bool = False  # prompts and answers are plain texts
    conversations: bool = False  # the chat template of the model is needed
    answers: Compared | None = None  # for `evaluation.generate`
    # Data to evaluate on that lie beside those to train on; None: rows are held out.
    held_out: ReasonedChoice | None = None
    called: str = ""  # the folder that both lie in
    remarks: list[str] = field(default_factory=list)
    of_names: list[str] = field(default_factory=list)  # what names of files say and nothing reads
    unused: list[str] = field(default_factory=list)  # what nothing reads, in words
    # The columns that have a sentence each there.
    explained: list[str] = field(default_factory=list)
