"""Names that follow from a config: of the method, of the model, of the run directory where none is given."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kubetune.config.schema import LoraConfig, TrainingConfig

RESOLVED = "resolved.json"
"""The whole config of a run, in its directory."""
FOLDERS = ("checkpoints", "logs", "answers", "exports")
"""Folders of a run directory that are ours."""
STARTED = "KUBETUNE_STARTED"
"""Variable by which the supervisor tells what comes after a run's last step which run the user has started."""
OF_TRACKERS = ("wandb", "mlruns", "tensorboard")
"""Folders of a run directory that trackers write, with links of their own; nothing of ours reads them."""


def method_label(lora: LoraConfig | None) -> str:
    """Return `lora-r16-a32`, or `full` without adapters."""
    if lora is None:
        return "full"
    return f"lora-r{lora.r}-a{lora.lora_alpha:g}"


def default_output(model_path: str, lora: LoraConfig | None, max_length: int, now: datetime) -> str:
    """Return the run directory if none is given: `outputs/Qwen3-8B/lora-r16-a32-len2048-20261120-1015`."""
    run = f"{method_label(lora)}-len{max_length}-{now:%Y%m%d-%H%M}"
    return f"outputs/{model_short_name(model_path)}/{run}"


def model_short_name(path: str) -> str:
    """The last part of a hub id or folder; for a folder of the hub's cache, the model's name and not its hash."""
    parts = PurePosixPath(path).parts or ("model",)
    cached = [part.rsplit("--", 1)[1] for part in parts if part.startswith("models--")]
    return (
        re.sub(r"[^A-Za-z0-9._-]+", "-", cached[0] if cached else parts[-1]).strip(".-") or "model"
    )


def prefers_greater(training: TrainingConfig) -> bool:
    """`greater_is_better`, or what the name of the metric that chooses the best checkpoint says."""
    if training.greater_is_better is not None:
        return training.greater_is_better
    return not training.metric_for_best_model.endswith(
        ("loss", "perplexity", "mae", "kl", "rejected")
    )
