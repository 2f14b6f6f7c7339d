"""Names of the metrics that evaluations have, by task. The best checkpoint is chosen by one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, assert_never

# The values of `task` in a run file.
RunTask = Literal[
    "causal_lm",
    "sequence_classification",
    "vision_language",
    "preference",
    "reward_model",
    "grpo",
    "distill",
]
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]

# Metrics that tasks/classification_metrics.py computes, by problem. `f1` exists for two classes only.
CLASSIFIER_METRICS: Final[dict[ProblemType, str]] = {
    "single_label_classification": "loss accuracy f1_macro matthews_correlation f1 precision recall",
    "multi_label_classification": "loss accuracy f1_macro f1_micro precision recall",
    "regression": "loss mae pearson spearman",
}

LANGUAGE_METRICS: Final = ("eval_loss", "eval_perplexity", "eval_token_accuracy")

# Metrics, besides the loss, of steps and evaluations of `task: reward_model`.
REWARD_MEASURES: Final = ("accuracy", "margin", "reward_chosen", "reward_rejected")

# The same for `task: preference`. Only KTO has `kl`.
PREFERENCE_MEASURES: Final = (*REWARD_MEASURES, "logp_chosen", "logp_rejected", "kl")

# What tells best, besides the loss, how a run of a task goes: measures of a step, shown with each loss and at the end.
TELLING: Final = ("reward", "reward_std", "accuracy", "margin", "divergence", "agreement")

# The same of evaluations: what the last lines of a run say of the model before training and of the best checkpoint.
TOLD_AT_THE_END: Final = (
    "loss",
    "divergence",
    "accuracy",
    "f1_macro",
    "f1_micro",
    "f1",
    "margin",
    "mae",
    "pearson",
    "spearman",
)

# Metrics of a step of `task: grpo`, means over tokens: divergence, shares of clipped ratios, sampler against training.
GRPO_MEASURES: Final = ("kl", "clip_low", "clip_high", "sampling_difference")

# Metrics of a step of `task: distill`, means over tokens: divergence from the teacher, share of places where both have the
# same likeliest token, probability of the compared tokens and share of those that are likely in both, cross-entropy.
DISTILL_MEASURES: Final = (
    "divergence", "agreement", "teacher_mass", "student_mass", "overlap", "cross_entropy"
)  # fmt: skip

# Metrics of the answers that a step of `task: grpo` learns from, which do not depend on the loss.
DRAWN_MEASURES: Final = (
    "reward",
    "solved",
    "zero_variance",
    "completion_length",
    "truncated",
    "entropy",
)

# What a step of `task: grpo` or `task: distill` took, in timings.jsonl. Servers may draw while the step trains.
SECONDS_OF_PARTS: Final = (
    "sync_seconds",
    "generate_seconds",
    "reward_seconds",
    "teacher_seconds",
    "train_seconds",
)

# Metrics of a step of a mixture of experts. The two router losses exist only if routers learn.
EXPERT_MEASURES: Final = (
    "expert_load_max", "expert_load_cv", "experts_unused", "dropped_tokens", "router_aux_loss", "router_z_loss"
)  # fmt: skip


# The metric that an evaluation is about, if it has it: reward or divergence from a teacher, then classes and answers
# that are right (accuracy says little if one class is rare), then numbers that are close.
_ABOUT: Final = (
    "reward", "divergence", "f1", "f1_macro", "f1_micro", "accuracy", "spearman", "pearson", "mae"
)  # fmt: skip
# Metrics that only explain others.
_BESIDES: Final = (*LANGUAGE_METRICS, "eval_reward_std", "eval_unjudged", "eval_kl", "eval_margin")


# Shares of answers, classes or tokens that are right, which people read as per cent.
_SHARES: Final = frozenset(
    "accuracy token_accuracy agreement overlap exact_match contains regex numeric label json_valid json_equal token_f1 "
    "rouge_l f1 f1_macro f1_micro precision recall solved zero_variance truncated".split()
)


def is_share(metric: str) -> bool:
    """True if a metric is a share, by its name."""
    return metric.removeprefix("eval_").partition("_pass_at_")[0] in _SHARES


def main_metric(
    evaluation: Mapping[str, Any], best_by: str | None = None, task: str | None = None
) -> str | None:
    """Return the metric of an evaluation that says best what its task is about; None for one without such a metric.

    `best_by`: `metric_for_best_model`; its user's choice wins, unless that is the loss, which all tasks have. A run by
    rewards is about its reward, whatever chooses its checkpoint. A metric that could not be computed is None, and is
    passed over.
    """
    computed = [name for name, value in evaluation.items() if value is not None]
    if best_by in computed and best_by != "eval_loss" and "eval_reward" not in computed:
        return best_by
    for name in _ABOUT:
        if f"eval_{name}" in computed:
            return f"eval_{name}"
    # Metrics of answers, such as exact_match, have any name.
    for name in computed:
        if name.startswith("eval_") and name not in _BESIDES and "/" not in name:
            return name
    # `task: distill` does not learn from a loss of the data's own answers.
    return "eval_loss" if "eval_loss" in computed and task != "distill" else None


def full_name(metric: Any) -> Any:
    """Return a metric's name in metrics.jsonl: `eval_accuracy` for `accuracy`. Other values are returned as they are."""
    if not isinstance(metric, str) or metric.startswith("eval_"):
        return metric
    return f"eval_{metric}"


def metrics_of(task: RunTask, problem_type: str, *, judged: bool = False) -> tuple[str, ...]:
    """Return all metrics that evaluations of this task may have.

    A classifier with `problem_type: auto` may have those of every problem: its data decide later. `judged`: answers are
    judged one by one (KTO), not compared in pairs.
    """
    match task:
        case "causal_lm" | "vision_language" | "grpo":
            return LANGUAGE_METRICS
        case "distill":
            return (*LANGUAGE_METRICS, "eval_divergence")
        case "preference":
            measures = [name for name in PREFERENCE_MEASURES if judged or name != "kl"]
            return ("eval_loss", *(f"eval_{name}" for name in measures))
        case "reward_model":
            return ("eval_loss", *(f"eval_{name}" for name in REWARD_MEASURES))
        case "sequence_classification":
            names: dict[str, None] = {}  # an ordered set
            for problem, metrics in CLASSIFIER_METRICS.items():
                if problem_type in ("auto", problem):
                    names |= dict.fromkeys(f"eval_{metric}" for metric in metrics.split())
            return tuple(names)
        case unknown:
            assert_never(unknown)


def is_greater_better(metric: str) -> bool:
    """True if a greater value of a metric is better, by its name."""
    # `reward_rejected` and `logp_rejected` belong to rejected answers.
    return not metric.endswith(("loss", "perplexity", "mae", "kl", "rejected", "divergence"))
