"""Tasks, the things that can be trained: one class each, in a module that is imported on use.

Not for the loop, which is the same for all (training). Read `task` first, then `causal_lm`.
"""

from __future__ import annotations

from importlib import import_module
from typing import cast

from kubetune.config.schema import Config
from kubetune.data.text.labels import Labels
from kubetune.tasks.task import Task

TASKS = {
    "causal_lm": "kubetune.tasks.causal_lm",
    "preference": "kubetune.tasks.preference",
    "reward_model": "kubetune.tasks.reward_model",
    "sequence_classification": "kubetune.tasks.sequence_classification",
    "vision_language": "kubetune.tasks.vision_language",
    "vision_preference": "kubetune.tasks.vision_preference",
}
"""The module of each task. Its `TASK` is the task."""


def task_of(config: Config) -> Task:
    """Return the config's task. Pairs of answers about images have a task of their own."""
    name = "vision_preference" if config.preference.images else config.task
    return cast(Task, import_module(TASKS[name]).TASK)


def metric_names(config: Config, labels: Labels | None) -> tuple[str, ...]:
    """Return the metrics of an evaluation. A classifier's follow from its labels."""
    return config.metrics if labels is None else labels.metrics
