"""The answers of a step in the run directory: `rollouts/step-000120.jsonl`, a line for each prompt.

    {"made_by": "5f2a…", "slot": 0, "row": 17, "text": "2+2=", "prompt": [9, 4, 9], "answers": [
        {"text": "4", "ids": [4, 2], "sampled": "AACA…", "entropy": 0.3, "is_cut": false, "rewards": {"exact_match": 1.0}}]}

Rank 0 appends lines as groups arrive, and makes them durable before the step learns from them. A resumed start takes
the groups whose lines are whole, and draws the others anew. `made_by` is a digest of the settings: groups that were made
with other settings are not taken. Log-probabilities are base64 of fp32, which gives back the same bits.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kubetune.base import files, jsonl
from kubetune.rundir.rollout_files import file_of as file_of
from kubetune.rundir.rollout_files import steps_of as steps_of


@dataclass(frozen=True)
class RewardedAnswer:
    """One answer to a prompt, with all that training needs to know of it."""

    ids: list[int]
    text: str
    sampled: list[float]  # log-probability of each token when it was drawn
    entropy: float  # of the distributions that its tokens were drawn from, mean over tokens
    is_cut: bool  # no token ended it
    rewards: dict[str, float | None]  # by name; None where a function could not judge
    old: list[float] | None = None  # log-probabilities that training gave before the first step
    reference: list[float] | None = None  # those of the model before training


@dataclass(frozen=True)
class Group:
    """All answers to one prompt of a step."""

    slot: int  # place of the prompt among those that are drawn together
    row: int  # of the training data
    prompt: list[int]
    text: str  # of the prompt
    answers: list[RewardedAnswer]
    errors: dict[str, str]  # by the name of a reward: why it could not judge
    logged: dict[str, float]  # by name: the mean of what functions logged (TRL's `log_metric`)


class RolloutFile:
    """The file of one step, open to be read and appended to by rank 0."""

    def __init__(self, run_dir: Path, step: int, made_by: str) -> None:
        """`made_by`: the digest of all settings that decide the answers and rewards."""
        self.path = file_of(run_dir, step)
        self._made_by = made_by
        self._appender: jsonl.Appender | None = None

    def groups(self) -> dict[int, Group]:
        """Return the whole groups by their slot."""
        groups: dict[int, Group] = {}
        for line in jsonl.read(self.path, _is_known):
            if line["made_by"] == self._made_by:
                group = _group_of(line)
                groups[group.slot] = group
        return groups

    def append(self, groups: Iterable[Group]) -> None:
        """Append groups, each as one line."""
        if self._appender is None:
            with files.explained_writes(self.path):
                self.path.parent.mkdir(exist_ok=True)
            self._appender = jsonl.Appender(self.path)
        # A line is one write. After a kill at most the last line is torn, and readers skip it.
        for group in groups:
            self._appender.append({"made_by": self._made_by, **_line_of(group)})

    def close(self) -> None:
        """Make what was appended durable."""
        if self._appender is not None:
            self._appender.sync()
            self._appender.close()
            self._appender = None

    def remove(self) -> None:
        """Remove the file, if there is one."""
        with files.explained_writes(self.path):
            self.path.unlink(missing_ok=True)


def read_groups(run_dir: Path, step: int) -> list[Group]:
    """Return the whole groups of a step in the order of their slots, made by any settings."""
    groups: dict[int, Group] = {}
    for line in jsonl.read(file_of(run_dir, step), _is_known):
        group = _group_of(line)
        groups[group.slot] = group
    return [groups[slot] for slot in sorted(groups)]


def _is_known(line: jsonl.Line) -> bool:
    """True if a line has the keys of a group. Other lines are skipped."""
    return {"made_by", "slot", "row", "text", "prompt", "answers", "errors"} <= line.keys()


def _line_of(group: Group) -> dict[str, Any]:
    """Return a group as an object of JSON, without `made_by`."""
    answers = []
    for answer in group.answers:
        line: dict[str, Any] = {
            "text": answer.text,
            "rewards": answer.rewards,
            "is_cut": answer.is_cut,
            "entropy": answer.entropy,
            "ids": answer.ids,
            "sampled": _packed(answer.sampled),
        }
        if answer.old is not None:
            line["old"] = _packed(answer.old)
        if answer.reference is not None:
            line["reference"] = _packed(answer.reference)
        answers.append(line)
    return {
        "slot": group.slot,
        "row": group.row,
        "text": group.text,
        "prompt": group.prompt,
        "answers": answers,
        "errors": group.errors,
        "logged": group.logged,
    }


def _group_of(line: jsonl.Line) -> Group:
    """Return the group of a line."""
    answers = []
    for answer in line["answers"]:
        # Losses without old weights or a reference write neither.
        old = None
        if "old" in answer:
            old = _unpacked(answer["old"])
        reference = None
        if "reference" in answer:
            reference = _unpacked(answer["reference"])
        answers.append(
            RewardedAnswer(
                ids=answer["ids"],
                text=answer["text"],
                sampled=_unpacked(answer["sampled"]),
                entropy=answer["entropy"],
                is_cut=answer["is_cut"],
                rewards=answer["rewards"],
                old=old,
                reference=reference,
            )
        )
    return Group(
        slot=line["slot"],
        row=line["row"],
        prompt=line["prompt"],
        text=line["text"],
        answers=answers,
        errors=line["errors"],
        logged=line.get("logged", {}),
    )


def _packed(numbers: Sequence[float]) -> str:
    """Return numbers as base64 of little-endian fp32."""
    return base64.b64encode(np.array(numbers, "<f4").tobytes()).decode()


def _unpacked(text: str) -> list[float]:
    """Return the numbers that `_packed` wrote."""
    numbers: list[float] = np.frombuffer(base64.b64decode(text), "<f4").tolist()
    return numbers
