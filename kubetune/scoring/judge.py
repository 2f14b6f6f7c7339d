"""Questions put to a model while it is trained, and the verdict on its answers.

All ranks share the rows that are asked, each row once. Which of them go together does not depend on how many ranks
there are, so that neither do the answers. Nothing is drawn at random, and nothing of the training changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from kubetune import errors
from kubetune.base import logs
from kubetune.base.humanize import counted
from kubetune.batching.image_batches import PictureReader, picture_reader
from kubetune.config.metric_names import full_name
from kubetune.config.schema.evaluation import GenerateConfig
from kubetune.distributed import process_group
from kubetune.distributed.main_rank import on_main
from kubetune.models import fsdp
from kubetune.models.padding_free import own_attention
from kubetune.rundir import heartbeat
from kubetune.scoring import own_functions
from kubetune.scoring.generation import acting_settings, generate, greedy
from kubetune.scoring.metrics import TARGETS, Measure, lacks_target, measures_of, of_all
from kubetune.scoring.questions import Question, drawn, records_of

if TYPE_CHECKING:
    from kubetune.config.schema import Config
    from kubetune.data.prepared.pipeline import Split
    from kubetune.data.prepared.rows import Rows
    from kubetune.data.text.tokenizer import Tokenizer
    from kubetune.distributed.process_group import World
    from kubetune.models.learner import Learner

_SHOWN = 60
"""Characters of a reference that a line shows."""


@dataclass(frozen=True)
class Judge:
    """Questions of each evaluation, and measures of the answers; these are rank 0's alone, which judges.

    `reader`: of the images that questions have. `records`: of each row asked, as it was read; only where functions of
    the user's want it. `remarks`: lines on references that a measure finds nothing in, rank 0's alone too.
    """

    wanted: GenerateConfig
    tokenizer: Tokenizer
    asked: Sequence[Question]
    reader: PictureReader | None = None
    measures: Mapping[str, Measure] = field(default_factory=dict)
    own: Mapping[str, own_functions.Function] = field(default_factory=dict)
    records: Mapping[int, dict[str, Any]] = field(default_factory=dict)
    remarks: Sequence[str] = ()

    def reference(self, question: Question) -> str:
        """The text that a question is to be answered with."""
        return self.tokenizer.decode(question.answer).strip()

    def score(self, answers: Mapping[int, str]) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Metrics of the answers by row, and a line for each: `row`, `answer`, `scores`."""
        told = [question for question in self.asked if question.row in answers]
        lines, references = list[dict[str, Any]](), list[str]()
        for question in told:
            answer, reference = answers[question.row], self.reference(question)
            references.append(reference)
            scores = {name: measure(answer, reference) for name, measure in self.measures.items()}
            if self.own:
                prompt = self.tokenizer.decode(question.ids)
                record = self.records[question.row]
                try:
                    scores |= {
                        n: own(prompt, answer, reference, record) for n, own in self.own.items()
                    }
                except errors.ConfigError as error:
                    raise errors.ConfigError(
                        f"row {question.row} of the evaluation data: {error}"
                    ) from error
            lines.append({"row": question.row, "answer": answer, "scores": scores})
        said = [line["answer"] for line in lines]
        return {
            full_name(name): of_all(
                name, [line["scores"][name] for line in lines], said, references
            )
            for name in (*self.measures, *self.own)
        }, lines


def judge_of(
    config: Config,
    tokenizer: Tokenizer,
    rows: Rows,
    world: World,
    split: Split = "eval",
    own: Mapping[str, own_functions.Function] = MappingProxyType({}),
) -> Judge | None:
    """The judge of the answers to these rows; None where nothing is asked. `own`: functions besides the config's.

    Raises ConfigError on every rank for packages, files and functions that are missing, and data that ask nothing.
    """
    wanted, file = config.evaluation.generate, config.evaluation.metrics
    if wanted is None:
        return None
    # A text that is trained whole asks nothing: any continuation of it may be right.
    found = islice((question for question in drawn(rows) if not question.is_whole), wanted.rows)
    asked = sorted(found, key=lambda question: question.row)
    if not asked:
        raise errors.ConfigError(
            "evaluation.generate: no row of the evaluation data has a prompt and an answer; expected conversations, or "
            "prompts with completions"
        )
    of_main: dict[str, Any] = {}

    def load() -> None:
        functions = {**(own_functions.load(file) if file is not None else {}), **own}
        records = (
            records_of(config, split, rows, [question.row for question in asked])
            if functions
            else {}
        )
        remarks = _remarks_on_references(wanted, tokenizer, asked)
        of_main.update(
            measures=measures_of(wanted), own=functions, records=records, remarks=remarks
        )

    on_main(load, world)
    return Judge(wanted, tokenizer, asked, picture_reader(rows), **of_main)


def _remarks_on_references(
    wanted: GenerateConfig, tokenizer: Tokenizer, asked: Sequence[Question]
) -> list[str]:
    """Return a line for each measure that finds nothing to compare with in some references, after logging it.

    Raises ConfigError where it finds nothing in any.
    """
    remarks = list[str]()
    texts = {question.row: tokenizer.decode(question.answer).strip() for question in asked}
    for name in filter(TARGETS.__contains__, wanted.metric):
        rows = [row for row, text in texts.items() if lacks_target(name, text, wanted.labels)]
        if not rows:
            continue
        first = f"the first is row {rows[0]}, {shortened(texts[rows[0]])!r}"
        if len(rows) == len(texts):
            raise errors.ConfigError(
                f"evaluation.generate.metric: {name} finds no {TARGETS[name]} in any of the {len(rows):,} references "
                f"({first}), so every answer would count as wrong; take another metric, or other evaluation data"
            )
        remarks.append(
            f"{name} finds no {TARGETS[name]} in {len(rows):,} of {counted(len(texts), 'reference')} ({first}); every "
            "answer to these counts as wrong"
        )
        logs.EVAL.warning("%s", remarks[-1])
    return remarks


def remarks_on_answers(lm: Any) -> list[str]:
    """Return a line on what the model's generation_config changes in greedy answers, if it does."""
    acting = acting_settings(lm)
    if not acting:
        return []
    shown = ", ".join(f"{key} {value}" for key, value in acting.items())
    return [f"answers are greedy, and the model's generation_config acts on them: {shown}"]


def shortened(text: str) -> str:
    """Return the beginning of a text, for a line."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def rehearse(judge: Judge, learner: Learner, world: World) -> None:
    """Let the longest questions be answered at full length on every rank: what that takes, and whether it works."""
    longest = _groups(judge, learner)[:1]
    _ask(
        judge,
        learner,
        world,
        longest,
        {"min_new_tokens": judge.wanted.max_new_tokens},
        lambda: False,
    )


def answer(
    judge: Judge, learner: Learner, world: World, is_stopping: Callable[[], bool]
) -> dict[int, str] | None:
    """Greedy answers by row, of all ranks on all ranks; None when a stop was asked for meanwhile.

    A model that attends to everything before it gets prompts of several lengths at a time, padded on the left; others
    get equal ones together. Where the time runs out, rows are left unasked, which is told.
    """
    mine = _ask(judge, learner, world, _groups(judge, learner), {}, is_stopping)
    if mine is None:
        return None
    answers = {
        row: text for part in process_group.gather(mine, world) for row, text in part.items()
    }
    if len(answers) < len(judge.asked) and world.is_main:
        logs.EVAL.warning(
            "evaluation.generate.max_seconds: %g s are over; %d of %d rows were asked, and the metrics are theirs",
            judge.wanted.max_seconds, len(answers), len(judge.asked),
        )  # fmt: skip
    return answers


def _ask(
    judge: Judge,
    learner: Learner,
    world: World,
    groups: Sequence[Sequence[Question]],
    settings: Mapping[str, Any],
    is_stopping: Callable[[], bool],
) -> dict[int, str] | None:
    """This rank's answers by row; None when a stop was asked for meanwhile."""
    began, lm, wanted = time.monotonic(), learner.lm, judge.wanted
    settings = {
        **greedy(wanted.max_new_tokens),
        "use_cache": True,
        "synced_gpus": fsdp.is_sharded(lm),
        **settings,
    }
    mine: dict[int, str] = {}
    learner.model.eval()
    try:
        with own_attention(lm), torch.no_grad():
            for first in range(0, len(groups), world.size):
                heartbeat.beat("evaluation")
                late = bool(
                    first and wanted.max_seconds and time.monotonic() - began > wanted.max_seconds
                )
                stopped, is_late = process_group.sum_numbers(
                    [float(is_stopping()), float(late)], world
                )
                if stopped:
                    return None
                if is_late:
                    break
                # Ranks of a sharded model run every step together: one that has nothing left asks again what is asked.
                group = groups[min(first + world.rank, len(groups) - 1)]
                own = [question.images for question in group]
                new = generate(
                    lm,
                    judge.tokenizer,
                    [question.ids for question in group],
                    settings,
                    judge.reader,
                    own,
                )
                if first + world.rank < len(groups):
                    mine |= {
                        q.row: judge.tokenizer.decode(ids).strip()
                        for q, ids in zip(group, new, strict=True)
                    }
    finally:
        fsdp.close(lm)
        learner.model.train()
    return mine


def _groups(judge: Judge, learner: Learner) -> list[list[Question]]:
    """Questions that go together, longest first; where images are no grids, those with some go alone."""
    padded, reader = learner.route.padding_free, judge.reader
    is_lone = reader is not None and not reader.processor.is_grid
    groups: list[list[Question]] = []
    for question in sorted(judge.asked, key=lambda question: (-len(question.ids), question.row)):
        last = groups[-1] if groups else []
        fits = (
            last
            and len(last) < judge.wanted.batch_size
            and not (is_lone and (question.images or last[0].images))
        )
        if fits and (padded or len(last[0].ids) == len(question.ids)):
            last.append(question)
        else:
            groups.append([question])
    return groups
