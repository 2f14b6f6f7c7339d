"""Metrics of the model's answers, and what they must reach: `evaluation`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from kubetune.config.gate import Condition
from kubetune.config.metric_names import full_name
from kubetune.config.schema.base import AsTuple, Section, section_of
from kubetune.config.schema.data import Sources
from kubetune.config.schema.grpo import GrpoConfig

AnswerMetric = Literal[
    "reward",
    "exact_match",
    "contains",
    "regex",
    "numeric",
    "json_valid",
    "json_equal",
    "label",
    "token_f1",
    "rouge_l",
    "bleu",
    "chrf",
]


@dataclass(frozen=True)
class MetricTraits:
    """What a metric of answers needs and is. What it computes has the same name in `scoring/metrics`."""

    compares: bool = True  # with a right answer, which each row must have
    # An answer is right or wrong by it: of several drawn answers to a question, some may be right.
    is_right_or_wrong: bool = False
    package: str | None = None  # that computes it, of the extra `evaluation`
    is_of_all_rows: bool = False  # it is measured over the whole corpus, and no mean of rows


_RIGHT_OR_WRONG: Final = MetricTraits(is_right_or_wrong=True)
_SACREBLEU: Final = MetricTraits(package="sacrebleu", is_of_all_rows=True)

METRICS: Final[dict[str, MetricTraits]] = {
    # The run's rewards judge it, which see more than two texts.
    "reward": MetricTraits(compares=False),
    "exact_match": _RIGHT_OR_WRONG,
    "contains": _RIGHT_OR_WRONG,
    "regex": _RIGHT_OR_WRONG,
    "numeric": _RIGHT_OR_WRONG,
    "json_valid": MetricTraits(compares=False, is_right_or_wrong=True),
    "json_equal": MetricTraits(),
    "label": _RIGHT_OR_WRONG,
    "token_f1": MetricTraits(),
    "rouge_l": MetricTraits(package="rouge_score"),
    "bleu": _SACREBLEU,
    "chrf": _SACREBLEU,
}

FORGET_LOSS = "eval_forget_loss"

# Rows that `task: grpo` asks unless the run file says otherwise: answers take longer than reading a row does, and the
# mean of so many rewards between 0 and 1 is known to 0.1 and better.
ASKED_BY_REWARD = 100

RIGHT_OR_WRONG = tuple(name for name, traits in METRICS.items() if traits.is_right_or_wrong)


def packages_of(metrics: Iterable[str]) -> list[str]:
    """Return the packages that compute some metrics."""
    packages = {METRICS[name].package for name in metrics}
    return sorted(package for package in packages if package is not None)


def asked_by_reward(evaluation: Any, grpo: GrpoConfig) -> Any:
    """Return the `evaluation` of a run file with what `task: grpo` asks at each evaluation: answers, for their reward.

    What is no mapping is returned as it is, for the schema to judge.
    """
    if not isinstance(evaluation, dict):
        return evaluation
    generate = evaluation.get("generate") or {}
    if not isinstance(generate, dict):
        return evaluation

    # The memory of a batch in training is known to be there.
    filled: dict[str, Any] = {
        "rows": ASKED_BY_REWARD,
        "max_new_tokens": grpo.max_completion_length,
        "batch_size": grpo.generation_batch_size,
    }
    metric = _as_list(generate.get("metric", ()))
    if isinstance(metric, (list, tuple)) and "reward" not in metric:
        metric = ("reward", *metric)
    return {**evaluation, "generate": {**filled, **generate, "metric": metric}}


def pass_names(metric: str, samples: int) -> tuple[str, str]:
    """Return the names of pass@1 and pass@k of a metric, in letters that every tracker takes."""
    return f"{metric}_pass_at_1", f"{metric}_pass_at_{samples}"


def _as_list(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Names = Annotated[
    tuple[str, ...],
    AsTuple,
    BeforeValidator(_as_list, json_schema_input_type=str | tuple[str, ...]),
]


class GenerateConfig(Section):
    """Answers that the model gives at each evaluation, and their metrics."""

    metric: Annotated[
        tuple[AnswerMetric, ...],
        AsTuple,
        BeforeValidator(_as_list, json_schema_input_type=AnswerMetric | tuple[AnswerMetric, ...]),
    ] = Field(
        (),
        description="Metrics of the answers; docs/evaluation.md says what each compares. `rouge_l` needs rouge-score, "
        "`bleu` and `chrf` need sacrebleu. `reward` is for `task: grpo`, which always has it.",
    )
    pattern: str | None = Field(
        None,
        description="Regular expression of `regex`. The match of its first group is compared; without groups, all of it.",
    )
    labels: Names = Field(
        (), description="Words of `label`. The first of them in an answer counts."
    )
    max_new_tokens: int = Field(
        128,
        ge=1,
        description="Longest answer in tokens; of `task: grpo`, left out: as in training.",
    )
    rows: int | None = Field(
        500,
        ge=1,
        description="Rows of `data.eval` that are asked, always the same ones; null: all. Of `task: grpo`, left out: 100.",
    )
    batch_size: int = Field(
        16,
        ge=1,
        description="Answers that a rank generates at a time; of `task: grpo`, left out: as in training, "
        "`grpo.generation_batch_size`.",
    )
    samples: int | None = Field(
        None,
        ge=2,
        le=1000,
        description="Besides the greedy answer, draw so many to each question. Metrics that are right or wrong then have "
        "`exact_match_pass_at_1`, the share of drawn answers that are right, and `exact_match_pass_at_8`, the share of "
        "questions with a right one among 8.",
    )
    temperature: float = Field(1.0, gt=0, le=100, description="Temperature of the drawn answers.")
    max_seconds: float | None = Field(
        None,
        gt=0,
        description="After this time an evaluation asks no more rows, and says how many it has asked.",
    )

    @field_validator("pattern")
    @classmethod
    def _is_a_pattern(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"found {value!r}, which is no regular expression: {error}") from None
        return value

    @model_validator(mode="after")
    def _says_what_it_needs(self) -> GenerateConfig:
        for metric, key in (("regex", "pattern"), ("label", "labels")):
            if (metric in self.metric) != bool(getattr(self, key)):
                raise ValueError(f"metric {metric} and {key} belong together; set both or none")
        if self.samples is not None and not self.sampled_metrics:
            raise ValueError(
                f"samples: none of the metrics is right or wrong; expected one of {', '.join(RIGHT_OR_WRONG)}"
            )
        if self.samples is None and "temperature" in self.changed_keys:
            raise ValueError("temperature: answers are greedy; set samples, or leave it out")
        return self

    @property
    def sampled_metrics(self) -> tuple[str, ...]:
        """Return the metrics that drawn answers are measured by; none where none are drawn."""
        if self.samples is None:
            return ()
        return tuple(name for name in self.metric if name in RIGHT_OR_WRONG)


def how_answered(metric: str, generate: GenerateConfig) -> str:
    """Return how the answers that a metric judges come about, beside its number.

    pass@1 of answers that are drawn is often far below the share of right greedy ones, and both are true.
    """
    if "_pass_at_" in metric:
        return f"{generate.samples} answers drawn at temperature {generate.temperature:g}"
    return "greedy answers"


class OwnMetricsConfig(Section):
    """Metrics of answers that are the user's functions."""

    file: str = Field(
        min_length=1, description="Your Python file. Nothing else is ever imported by name."
    )
    functions: Annotated[Names, Field(min_length=1)] = Field(
        description="Functions in it: `function(prompt, answer, reference, record) -> float`."
    )

    @field_validator("functions")
    @classmethod
    def _are_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not name.isidentifier():
                raise ValueError(f"found {name!r}; expected the name of a function")
        return value


class ForgetConfig(Section):
    """Data that the model must not forget."""

    data: Sources = Field(
        description="Sources of what must not be forgotten, such as `general.jsonl#500`."
    )


class BenchmarksConfig(Section):
    """Tasks of lm-evaluation-harness, run after the last step."""

    tasks: Annotated[Names, Field(min_length=1)] = Field(
        description="Tasks by the harness's names, such as `gsm8k`."
    )
    tasks_folder: str | None = Field(
        None,
        description="Folder with your own task files, or with copies of the harness's for a place without network.",
    )
    limit: int | None = Field(
        None, ge=1, description="Number of rows to ask, the first ones of each task; left out: all."
    )


class EvaluationConfig(Section):
    """Metrics besides the task's, and what they must reach."""

    generate: GenerateConfig | None = Field(
        None,
        description="At each evaluation, let the model answer rows of `data.eval`, and measure its answers.",
    )
    metrics: OwnMetricsConfig | None = Field(
        None, description="Your own metrics of the same answers."
    )
    forget: Annotated[
        ForgetConfig | None,
        BeforeValidator(section_of("data", list), json_schema_input_type=str | ForgetConfig | None),
    ] = Field(None, description="At each evaluation, `eval_forget_loss`: the loss on other data.")
    benchmarks: Annotated[
        BenchmarksConfig | None,
        BeforeValidator(
            section_of("tasks", list), json_schema_input_type=Names | BenchmarksConfig | None
        ),
    ] = Field(
        None,
        description="After the last step, tasks of EleutherAI's lm-evaluation-harness on the best checkpoint and "
        "on the model before training: `[gsm8k, ifeval, arc_easy]`. Needs the extra `benchmarks`.",
    )
    gate: dict[str, str] = Field(
        default_factory=dict,
        description="What metrics of the best checkpoint must reach, such as `{exact_match: '>= 0.9', forget_loss: "
        "'<= +2%', arc_easy: '>= 0.4'}`. A sign means a change against the base model. A run that misses one ends with "
        "exit code 5.",
    )

    @field_validator("gate", mode="before")
    @classmethod
    def _as_texts(cls, value: Any) -> Any:
        # A bare number is no condition; that is said in the words of conditions.
        if not isinstance(value, dict):
            return value
        return {
            name: str(wanted) if isinstance(wanted, (int, float)) else wanted
            for name, wanted in value.items()
        }

    @field_validator("gate")
    @classmethod
    def _are_conditions(cls, value: dict[str, str]) -> dict[str, str]:
        problems = []
        for name, text in value.items():
            try:
                Condition.parse(text)
            except ValueError as error:
                problems.append(f"{name}: {error}")
        if problems:
            raise ValueError("; ".join(problems))
        return {full_name(name): text for name, text in value.items()}

    @model_validator(mode="after")
    def _asks_what_it_measures(self) -> EvaluationConfig:
        if self.metrics is not None and self.generate is None:
            raise ValueError(
                "metrics judge answers: add a generate section, `generate: {}` will do"
            )
        if self.generate is not None and not self.generate.metric and self.metrics is None:
            raise ValueError(
                "generate.metric: none given; name some, or functions of your own in metrics"
            )
        names = [name.removeprefix("eval_") for name in self.names]
        # Your function must not have the name of a metric of ours, or the two would be one curve.
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"two metrics are called {', '.join(repeated)}; rename your function")
        return self

    @property
    def answer_measures(self) -> tuple[str, ...]:
        """Return the built-in metrics of answers, as the run file has them."""
        return () if self.generate is None else self.generate.metric

    @property
    def answer_metrics(self) -> tuple[str, ...]:
        """Return the names of the metrics of answers, as metrics.jsonl has them."""
        # Ours first, then the user's.
        names: list[str] = []
        if self.generate is not None:
            names += self.generate.metric
            for metric in self.generate.sampled_metrics:
                names += pass_names(metric, self.generate.samples or 0)
        if self.metrics is not None:
            names += self.metrics.functions
        return tuple(full_name(name) for name in names)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all metrics that this section adds to an evaluation."""
        if self.forget is None:
            return self.answer_metrics
        return (*self.answer_metrics, FORGET_LOSS)

    def is_benchmark(self, name: str) -> bool:
        """True for a metric of a benchmark: `arc_easy`, which is its first metric, or `arc_easy/acc_norm`."""
        if self.benchmarks is None:
            return False
        return name.removeprefix("eval_").partition("/")[0] in self.benchmarks.tasks
