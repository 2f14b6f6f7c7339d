"""Tasks, the things that can be trained: one class each, in a module that is imported on use.

Not for the loop, which is the same for all (training). Read `task` first, then `causal_lm`.
"""

from __future__ import annotations

from importlib import import_module
from typing import cast

from kubetune.tasks.task import Task

# The module of each task. Its `TASK` is the task.
TASKS = {
    "causal_lm": "kubetune.tasks.causal_lm",
    "distill": "kubetune.tasks.distill",
    "grpo": "kubetune.tasks.grpo.task",
    "preference": "kubetune.tasks.preference",
    "reward_model": "kubetune.tasks.reward_model",
    "sequence_classification": "kubetune.tasks.sequence_classification",
    "vision_language": "kubetune.tasks.vision_language",
    "vision_preference": "kubetune.tasks.vision_preference",
}


def task_of(name: str) -> Task:
    """Return a task by `Config.task_name`."""
    return cast(Task, import_module(TASKS[name]).TASK)
