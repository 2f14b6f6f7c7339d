"""Preferences between answers about images: the task is preference's, the rows are vision_language's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kubetune.distributed.process_group import World
from kubetune.tasks import vision_language
from kubetune.tasks.preference import (
    STEP_METRICS,
    backward,
    completed,
    confusion,
    evaluate,
    labels_of,
    load_settings,
    metrics,
    predictions,
    sample_losses,
)
from kubetune.tasks.vision_language import AUTO_CLASS, plain_logits

if TYPE_CHECKING:
    from kubetune.config.schema import Config
    from kubetune.models.acceleration import Workload
    from kubetune.models.learner import Learner

__all__ = [
    "AUTO_CLASS", "STEP_METRICS", "backward", "build", "completed", "confusion", "evaluate", "labels_of", "load",
    "load_settings", "metrics", "plain_logits", "predictions", "sample_losses",
]  # fmt: skip


def build(config: Config, world: World, workload: Workload) -> Learner:
    """A model that sees ready to train, with the preference that it is to learn."""
    return replace(vision_language.build(config, world, workload), preference=config.preference)


def load(config: Config, folder: Path, device: torch.device) -> Learner:
    """The trained model of a checkpoint folder, to be evaluated."""
    return replace(vision_language.load(config, folder, device), preference=config.preference)
