"""Defaults that follow from another setting, and the metrics that `best` may be chosen by."""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import ValidationInfo

if TYPE_CHECKING:
    from kubetune.config.schema import Config, TrainingConfig

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]

CLASSIFIER_METRICS: Final[dict[ProblemType, str]] = {
    "single_label_classification": "loss accuracy f1_macro matthews_correlation f1 precision recall",
    "multi_label_classification": "loss accuracy f1_macro f1_micro precision recall",
    "regression": "loss mae pearson spearman",
}
"""What classification_metrics.py measures, known here before it is imported; f1 of two classes only."""

LANGUAGE_METRICS: Final = ("eval_loss", "eval_perplexity", "eval_token_accuracy")


def data_of_task(data: Any, info: ValidationInfo) -> Any:
    """A classifier tells a long text by its beginning, so that an evaluation counts every row."""
    if info.data.get("task") != "sequence_classification" or not isinstance(data, dict):
        return data
    return {"overlong": "truncate", **data}


def today() -> str:
    """The date of this day, here."""
    return date.today().isoformat()


def day_of(config: Config) -> str:
    """`data.date`; today where no start of the run has filled it in yet."""
    return config.data.date or today()


def dated(config: Config, first_start: Any) -> Config:
    """The config with the date that the run keeps: that of its first start, else its own, else today's.

    `first_start`: what was resolved then, None where this is it. One of a version that kept no date gets none.
    """
    known = None if first_start is None else (first_start.get("data") or {}).get("date")
    day = known or config.data.date or (None if first_start is not None else today())
    return config.model_copy(update={"data": config.data.model_copy(update={"date": day})})


def prefers_greater(training: TrainingConfig) -> bool:
    """`greater_is_better`, or what the name of the metric that chooses the best checkpoint says."""
    if training.greater_is_better is not None:
        return training.greater_is_better
    return not training.metric_for_best_model.endswith(("loss", "perplexity", "mae"))


def full_name(metric: Any) -> Any:
    """A metric as metrics.jsonl has it: `accuracy` means `eval_accuracy`."""
    return metric if not isinstance(metric, str) or metric.startswith("eval_") else f"eval_{metric}"


def metrics_of(config: Config) -> tuple[str, ...]:
    """All metrics that evaluations of this task may have; which ones a classifier has, its data decide."""
    if config.task != "sequence_classification":
        return LANGUAGE_METRICS
    wanted = config.classification.problem_type
    known = [names for problem, names in CLASSIFIER_METRICS.items() if wanted in ("auto", problem)]
    return tuple(dict.fromkeys(f"eval_{name}" for names in known for name in names.split()))
