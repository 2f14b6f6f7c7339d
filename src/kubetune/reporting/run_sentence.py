"""What a run is in words: what it learns from which model, then method, data, device and batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kubetune.base.humanize import counted, number
from kubetune.config.metric_names import is_share
from kubetune.config.naming import model_label
from kubetune.config.schema import ClassificationConfig, DistillConfig, ModelConfig, RewardConfig
from kubetune.plan.rank_work import quantization_of
from kubetune.reporting.reading import RunRecord

# Losses of pairs, and of judged answers, as their papers write them.
_LOSSES = {"robust": "robust DPO", "hinge": "SLiC", "simpo": "SimPO"}


def task_in_words(run: RunRecord) -> str:
    """Return what a run learns, as people call it: "Preference (DPO)", "Classifier, 2 classes"."""
    config = run.config
    match config.task:
        case "preference":
            loss = config.preference.loss
            return f"Preference ({_LOSSES.get(loss, loss.upper())})"
        case "reward_model":
            return "Reward model"
        case "sequence_classification":
            return _classifier(config.classification, run.data)
        case "grpo":
            return "GRPO"
        case "distill":
            return "Distillation"
        case "vision_language":
            return "Supervised fine-tuning (SFT) on images"
    return "Supervised fine-tuning (SFT)"


def kind(run: RunRecord) -> str:
    """Return what a run learns, and from which model: "Preference (DPO) of chat-0.8m"."""
    task = task_in_words(run)
    config = run.config
    match config.task:
        case "reward_model" | "sequence_classification":
            return f"{task}, from {run.model}"
        case "grpo":
            return f"{task} of {run.model}, rewarded by {_rewards(config.rewards)}"
        case "distill":
            return f"{run.model} distilled from {_teacher(config.distill, config.model)}"
    return f"{task} of {run.model}"


def _classifier(classification: ClassificationConfig, data: Mapping[str, Any]) -> str:
    """Return a classifier with the number of its classes, as far as settings or prepared data name them."""
    if classification.problem_type == "regression":
        return "Classifier of numbers"
    train = (data.get("splits") or {}).get("train") or {}
    classes = classification.labels or train.get("classes") or ()
    if not classes:
        return "Classifier"
    return f"Classifier, {counted(len(classes), 'class')}"


def _rewards(rewards: Sequence[RewardConfig]) -> str:
    """Return the rewards that are summed up, and the most that an answer can get where all of them are shares."""
    text = " + ".join(reward.title for reward in rewards)
    for reward in rewards:
        if reward.is_code or reward.is_model or not is_share(reward.title) or reward.weight < 0:
            return text
    return f"{text}, {number(sum(reward.weight for reward in rewards))} at most"


def _teacher(distill: DistillConfig, learner: ModelConfig) -> str:
    """Return the name of a teacher."""
    if distill.has_for_teacher(learner):
        return "itself"
    teacher = distill.teacher
    if not isinstance(teacher, str):
        return counted(len(teacher or ()), "server")
    return model_label(teacher)


def sentence(run: RunRecord) -> str:
    """Return method, data and batch of the run: "LoRA of rank 8 on train.jsonl; 1 process on CPU, 16 rows a step"."""
    config = run.config
    plan = run.plan

    # Such as "LoRA of rank 8 with a base in 4bit".
    method = "Full fine-tuning"
    if config.lora:
        method = f"LoRA of rank {config.lora.r}"
    quantization: str = config.quantization
    if plan is not None:
        # `auto` is decided by the device and the number of ranks.
        quantization = quantization_of(config.quantization, config.lora, plan)
    if quantization != "none":
        method += f" with a base in {quantization}"

    sources = ", ".join(Path(source.path).name for source in config.data.train)
    text = f"{method} on {sources}"
    if plan is None:
        return text

    # Such as "2 processes on GPU, about 32 rows a step".
    device = "GPU" if plan.device == "cuda" else "CPU"
    processes = counted(plan.world_size, "process")
    rows = counted(plan.global_batch_size, "row")
    # Batches that are cut by tokens have a mean number of rows.
    about = "about " if plan.global_batch_tokens else ""
    return f"{text}; {processes} on {device}, {about}{rows} a step"
