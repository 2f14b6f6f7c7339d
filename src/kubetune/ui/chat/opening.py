"""The opening of a chat: which run is talked to, what it was asked when it was judged, and what one may ask it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kubetune.config.schema.data import SourceConfig
from kubetune.data.findings import kept_conversations
from kubetune.data.reading.examples import Labelled
from kubetune.data.reading.formats import convert
from kubetune.data.reading.record_problems import Problems
from kubetune.data.reading.sources import read_source
from kubetune.errors import EnvironmentFault, KubetuneError
from kubetune.reporting.point_details.kept_answers import answers_of
from kubetune.reporting.rendering import turns
from kubetune.rundir import metrics, shapes
from kubetune.ui.site import Site

MOST_PROMPTS = 3  # that a page proposes, and as many that it shows with their answers
_LOOKED_AT = 100  # records of each source in which a row of each class is looked for
# What one does on the page with a run, by its task; with all others one talks.
ASKING = {"sequence_classification": "Classify", "reward_model": "Score"}


@dataclass(frozen=True)
class Asked:
    """A question, and what evaluations keep of it; texts are empty where nothing is known."""

    question: str
    expected: str = ""
    before: str = ""  # the answer of the model before training
    after: str = ""  # the answer of the checkpoint that was chosen


def runs_to_talk_to(site: Site) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return all runs that have a model, the newest first, and those of them that a page offers."""
    # A run without a checkpoint has no model.
    listed = [run for run in site.records.listed() if run["saved_step"] is not None]
    listed.sort(key=lambda run: run["started"] or "", reverse=True)
    # Trials are many, and seldom whom one wants to talk to.
    offered = [run for run in listed if not site.records.sweep_of(Path(run["path"]))]
    return listed, offered or listed


def first_of(offered: Sequence[Mapping[str, Any]]) -> str:
    """Return the run that a page opens with, "" without any: the newest good one that talks, else that talks, else any."""
    talking = [run for run in offered if run["task"] not in ASKING]
    done = [run for run in talking if run["state"] == "done" and not run["cautions"]]
    for run in [*done, *talking, *offered]:
        return str(run["dir"])
    return ""


def questions_of(run_dir: Path) -> list[Asked]:
    """Return what a run may be asked: first what it answered better after training, then what else was held out.

    Without these, conversations of its data.
    """
    verdict: dict[str, Any] = {}
    with suppress(FileNotFoundError, EnvironmentFault):
        verdict = shapes.read(run_dir / metrics.VERDICT)
    questions: dict[str, Asked] = {}
    for asked in (*_bettered(verdict), *_held_out(run_dir)):
        questions.setdefault(asked.question, asked)
    if not questions:
        with suppress(EnvironmentFault):
            for asked in _kept(run_dir):
                questions.setdefault(asked.question, asked)
    return list(questions.values())


def _bettered(verdict: Mapping[str, Any]) -> Iterator[Asked]:
    """Yield the questions of a verdict that were answered better after training."""
    for sides in (verdict.get("turned") or {}).values():
        for line in sides.get("gained") or ():
            spoken = turns(str(line.get("prompt", "")))
            if not spoken or spoken[-1]["role"] != "user":
                continue
            yield Asked(
                spoken[-1]["content"],
                expected=str(line.get("reference") or ""),
                before=str(line.get("before") or ""),
                after=str(line.get("answer") or ""),
            )


def _held_out(run_dir: Path) -> Iterator[Asked]:
    """Yield the questions of one turn that the model was asked before training."""
    for line in answers_of(run_dir, 0):
        spoken = turns(line["prompt"])
        if len(spoken) == 1:
            yield Asked(spoken[0]["content"], line["reference"])


def _kept(run_dir: Path) -> Iterator[Asked]:
    """Yield what users ask last in conversations of the data. Raise EnvironmentFault for damaged ones."""
    for kept in kept_conversations.read(run_dir):
        last = kept.messages[-1] if kept.messages else {}
        if last.get("role") == "user" and isinstance(last.get("content"), str):
            yield Asked(last["content"])


def rows_to_classify(sources: Sequence[SourceConfig]) -> list[Asked]:
    """Return a row of each class from files of held-out rows; none of files that are gone."""
    rows: dict[str, Asked] = {}
    with suppress(KubetuneError, OSError):
        for source in sources:
            # Data of the hub would have to be fetched.
            if not os.path.exists(source.path):
                continue
            for record in islice(read_source(source, Problems()), _LOOKED_AT):
                with suppress(ValueError):  # the evaluation has counted it
                    row = convert(record.value, source.format, source.columns, kind="labelled")
                    if isinstance(row, Labelled) and row.text and row.second is None:
                        label = str(row.label)
                        rows.setdefault(label, Asked(row.text, label))
    return list(rows.values())
