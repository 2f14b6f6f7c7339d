"""Tasks, the things that can be trained: one module each, imported on use.

Each fulfils one protocol. Not for the loop, which is the same for all (training). Read `protocol` first, then
`causal_lm`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from kubetune.config.schema import Config
from kubetune.data.text.labels import Labels
from kubetune.tasks.protocol import Task

TASKS = {
    "causal_lm": "kubetune.tasks.causal_lm",
    "preference": "kubetune.tasks.preference",
    "reward_model": "kubetune.tasks.reward_model",
    "sequence_classification": "kubetune.tasks.sequence_classification",
    "vision_language": "kubetune.tasks.vision_language",
    "vision_preference": "kubetune.tasks.vision_preference",
}


def metric_names(config: Config, labels: Labels | None) -> tuple[str, ...]:
    """Metrics of an evaluation of the config's task: of a classifier, with these labels."""
    return config.metrics if labels is None else labels.metrics


def task_module(config: Config) -> Task:
    """The module of the config's task, which is another where pairs of answers are about images."""
    return cast(
        Task, import_module(TASKS["vision_preference" if config.preference.images else config.task])
    )


if TYPE_CHECKING:
    from kubetune.tasks import (
        causal_lm,
        preference,
        reward_model,
        sequence_classification,
        vision_language,
        vision_preference,
    )

    # mypy compares each module with the protocol.
    _causal_lm: Task = causal_lm
    _preference: Task = preference
    _reward_model: Task = reward_model
    _sequence_classification: Task = sequence_classification
    _vision_language: Task = vision_language
    _vision_preference: Task = vision_preference
