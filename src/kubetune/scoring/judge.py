"""Questions of evaluations, and what the answers of a model measure. `asking` asks them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from kubetune import errors
from kubetune.base import logs
from kubetune.base.humanize import counted
from kubetune.batching.image_batches import PictureReader, picture_reader
from kubetune.config.metric_names import full_name
from kubetune.config.schema.evaluation import EvaluationConfig, GenerateConfig, pass_names
from kubetune.data.text.answer_targets import TARGETS, lacks_target
from kubetune.distributed.main_rank import on_main
from kubetune.scoring import own_functions
from kubetune.scoring.metrics import Measure, measures_of, of_all
from kubetune.scoring.questions import Question, drawn, records_of

if TYPE_CHECKING:
    from kubetune.config.schema import SourceConfig
    from kubetune.data.prepared.rows import Rows
    from kubetune.data.text.tokenizer import Tokenizer
    from kubetune.distributed.process_group import World

# Characters of a reference that a line shows.
_SHOWN = 60


class Reply(NamedTuple):
    """An answer of the model."""

    text: str  # without special tokens
    ids: tuple[int, ...]  # without the token that ends it


@dataclass(frozen=True)
class Rewarded:
    """The rewards of `task: grpo` for an answer."""

    total: float  # weighted sum; 0 if no reward could judge it, as in TRL
    rewards: Mapping[str, float | None]  # by name; None if it could not judge


@dataclass(frozen=True)
class Judge:
    """Questions of each evaluation, and measures of the answers."""

    wanted: GenerateConfig
    tokenizer: Tokenizer
    asked: Sequence[Question]
    reader: PictureReader | None = None  # of the images that questions have

    # Only rank 0 judges, so only it has these.
    measures: Mapping[str, Measure] = field(default_factory=dict)  # the built-in ones, by name
    functions: Mapping[str, own_functions.Function] = field(default_factory=dict)  # the user's
    records: Mapping[int, dict[str, Any]] = field(default_factory=dict)  # by row, for `functions`
    remarks: Sequence[str] = ()  # lines on references that a measure finds nothing in

    def reference(self, question: Question) -> str:
        """Return the text that a question is to be answered with."""
        return self.tokenizer.decode(question.answer).strip()

    def score(
        self,
        answers: Mapping[int, Sequence[Reply]],
        rewards: Mapping[int, Rewarded] = MappingProxyType({}),
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return metrics of the answers by row, and a line for each row: `row`, `answer`, `scores`, `samples`.

        The first answer of a row is the greedy one; those that were drawn are after it. `rewards`: of the greedy
        answers, if rewards judged them.
        """
        lines: list[dict[str, Any]] = []
        texts: list[str] = []
        references: list[str] = []
        for question in self.asked:
            # If the time ran out, some were not asked.
            if question.row not in answers:
                continue
            answer, *samples = [reply.text.strip() for reply in answers[question.row]]
            reference = self.reference(question)
            scores = self._score_row(question, answer, reference)
            line: dict[str, Any] = {"row": question.row, "answer": answer, "scores": scores}
            if question.row in rewards:
                rewarded = rewards[question.row]
                # First, since it is what such a run is about.
                scores = {"reward": rewarded.total, **scores}
                line |= {"scores": scores, "rewards": dict(rewarded.rewards)}
            if samples:
                scores |= self._score_samples(samples, reference)
                line["samples"] = samples
            lines.append(line)
            texts.append(answer)
            references.append(reference)

        metrics = _means_of_rewards([rewards[line["row"]] for line in lines if rewards])
        of_samples: list[str] = []
        for name in self.wanted.sampled_metrics:
            of_samples += pass_names(name, self.wanted.samples or 0)
        for name in (*self.measures, *of_samples, *self.functions):
            of_rows = [line["scores"][name] for line in lines]
            metrics[full_name(name)] = of_all(name, of_rows, texts, references)
        return metrics, lines

    def _score_samples(self, samples: Sequence[str], reference: str) -> dict[str, float]:
        """Return pass@1, the share of drawn answers that are right, and pass@k, 1 if any is, of each such metric."""
        scores = {}
        for name in self.wanted.sampled_metrics:
            right = [self.measures[name](sample, reference) for sample in samples]
            at_1, at_k = pass_names(name, len(samples))
            scores[at_1] = sum(right) / len(right)
            scores[at_k] = max(right)
        return scores

    def _score_row(
        self,
        question: Question,
        answer: str,
        reference: str,
    ) -> dict[str, float]:
        scores = {name: measure(answer, reference) for name, measure in self.measures.items()}
        if not self.functions:
            return scores
        # Functions of the user's see texts and the record as it was read, not ids.
        prompt = self.tokenizer.decode(question.ids)
        record = self.records[question.row]
        try:
            for name, function in self.functions.items():
                scores[name] = function(prompt, answer, reference, record)
        except errors.ConfigError as error:
            place = f"row {question.row} of the evaluation data"
            raise errors.ConfigError(f"{place}: {error}") from error

        return scores


def _means_of_rewards(rewarded: Sequence[Rewarded]) -> dict[str, float]:
    """Return `eval_reward`, how far it spreads over the answers, and each reward by itself if there are several."""
    if not rewarded:
        return {}
    totals = [answer.total for answer in rewarded]
    metrics = {
        "eval_reward": statistics.fmean(totals),
        "eval_reward_std": statistics.pstdev(totals),
    }
    names = list(rewarded[0].rewards)
    for name in names:
        values = [answer.rewards[name] for answer in rewarded]
        known = [value for value in values if value is not None]
        if known and len(names) > 1:
            metrics[f"eval_reward/{name}"] = statistics.fmean(known)
    unjudged = sum(not any_known(answer) for answer in rewarded)
    if unjudged:
        metrics["eval_unjudged"] = unjudged / len(rewarded)
    return metrics


def any_known(rewarded: Rewarded) -> bool:
    """True if some reward could judge the answer."""
    return any(value is not None for value in rewarded.rewards.values())


def judge_of(
    evaluation: EvaluationConfig,
    tokenizer: Tokenizer,
    sources: Sequence[SourceConfig],
    rows: Rows,
    world: World,
    functions: Mapping[str, own_functions.Function] = MappingProxyType({}),
) -> Judge | None:
    """Return the judge of the answers to these rows; None if nothing is asked.

    `sources`: those that the rows were made of. `functions`: besides the config's.

    Raise ConfigError on every rank for packages, files and functions that are missing, and data that ask nothing.
    """
    wanted = evaluation.generate
    if wanted is None:
        return None

    # A text that is trained whole asks nothing: any continuation of it may be right.
    questions = (question for question in drawn(rows) if not question.is_whole)
    asked = sorted(islice(questions, wanted.rows), key=lambda question: question.row)
    if not asked:
        raise errors.ConfigError(
            "evaluation.generate: no row of the evaluation data has a prompt and an answer; expected conversations, or "
            "prompts with completions"
        )

    judge = Judge(wanted, tokenizer, asked, picture_reader(rows))

    def load() -> None:
        nonlocal judge
        loaded = dict(functions)
        if evaluation.metrics is not None:
            loaded = {**own_functions.load(evaluation.metrics), **functions}
        records = {}
        if loaded:
            records = records_of(sources, rows, [question.row for question in asked])
        remarks = _remarks_on_references(wanted, tokenizer, asked)
        judge = replace(
            judge,
            measures=measures_of(wanted),
            functions=loaded,
            records=records,
            remarks=remarks,
        )

    # Only rank 0 runs `load`. It returns nothing: functions cannot be sent to other ranks.
    on_main(load, world)
    return judge


def _remarks_on_references(
    wanted: GenerateConfig,
    tokenizer: Tokenizer,
    asked: Sequence[Question],
) -> list[str]:
    """Return a line for each measure that finds nothing to compare with in some references, after logging it.

    Raise ConfigError if it finds nothing in any.
    """
    remarks: list[str] = []
    texts = {question.row: tokenizer.decode(question.answer).strip() for question in asked}
    for name in wanted.metric:
        # Other measures compare any reference.
        if name not in TARGETS:
            continue
        rows = [row for row, text in texts.items() if lacks_target(name, text, wanted.labels)]
        if not rows:
            continue

        first = f"the first is row {rows[0]}, {shortened(texts[rows[0]])!r}"
        if len(rows) == len(texts):
            raise errors.ConfigError(
                f"evaluation.generate.metric: {name} finds no {TARGETS[name].title} in any of the {len(rows):,} references "
                f"({first}), so every answer would count as wrong; take another metric, or other evaluation data"
            )
        remark = (
            f"{name} finds no {TARGETS[name].title} in {len(rows):,} of {counted(len(texts), 'reference')} ({first}); every "
            "answer to these counts as wrong"
        )
        remarks.append(remark)
        logs.EVAL.warning("%s", remark)

    return remarks


def shortened(text: str) -> str:
    """Return the beginning of a text, for a line."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
