"""Names of the metrics that evaluations of each task have: `best` may be chosen by one of them."""

from __future__ import annotations

from typing import Any, Final, Literal

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]

CLASSIFIER_METRICS: Final[dict[ProblemType, str]] = {
    "single_label_classification": "loss accuracy f1_macro matthews_correlation f1 precision recall",
    "multi_label_classification": "loss accuracy f1_macro f1_micro precision recall",
    "regression": "loss mae pearson spearman",
}
"""Measures of tasks/classification_metrics.py, known here before it is imported; f1 of two classes only."""

LANGUAGE_METRICS: Final = ("eval_loss", "eval_perplexity", "eval_token_accuracy")

REWARD_MEASURES: Final = ("accuracy", "margin", "reward_chosen", "reward_rejected")
"""Measures, besides the loss, of steps and evaluations of `task: reward_model`."""

PREFERENCE_MEASURES: Final = (*REWARD_MEASURES, "logp_chosen", "logp_rejected", "kl")
"""The same of `task: preference`; only KTO has `kl`."""

EXPERT_MEASURES: Final = (
    "expert_load_max", "expert_load_cv", "experts_unused", "dropped_tokens", "router_aux_loss", "router_z_loss"
)  # fmt: skip
"""Measures of steps of a mixture of experts; losses of routers only where these learn."""


def full_name(metric: Any) -> Any:
    """A metric as metrics.jsonl has it: `accuracy` means `eval_accuracy`."""
    return metric if not isinstance(metric, str) or metric.startswith("eval_") else f"eval_{metric}"


def metrics_of(task: str, problem_type: str, *, judged: bool = False) -> tuple[str, ...]:
    """All metrics that evaluations of this task may have; which ones a classifier has, its data decide.

    `judged`: answers are, one by one, and not compared.
    """
    if task in ("preference", "reward_model"):
        measures = PREFERENCE_MEASURES if task == "preference" else REWARD_MEASURES
        return ("eval_loss", *(f"eval_{name}" for name in measures if judged or name != "kl"))
    if task != "sequence_classification":
        return LANGUAGE_METRICS
    known = [
        names for problem, names in CLASSIFIER_METRICS.items() if problem_type in ("auto", problem)
    ]
    return tuple(dict.fromkeys(f"eval_{name}" for names in known for name in names.split()))
