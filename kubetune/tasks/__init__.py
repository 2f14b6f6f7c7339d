"""What can be learnt: one module per task, imported on use.

A task module has `build(config, world)`, `load(config, folder, device)`, `backward(learner, batch, scale)`,
`evaluate(learner, batch)`, and `metrics(learner, parts, world)` of what that gave for all batches of this rank;
`sample_losses(learner, parts)` are the ids, summed losses and numbers of labels of its samples. A learner has `model`
and `route`. What is exported is loaded by `AUTO_CLASS` of transformers with `load_settings(config, folder)`, and
compared by `plain_logits(model, batch)`.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from kubetune.config.metric_names import LANGUAGE_METRICS
from kubetune.config.schema import Config
from kubetune.data.text.labels import Labels

TASKS = {
    "causal_lm": "kubetune.tasks.causal_lm",
    "sequence_classification": "kubetune.tasks.sequence_classification",
    "vision_language": "kubetune.tasks.vision_language",
}


def metric_names(labels: Labels | None) -> tuple[str, ...]:
    """What an evaluation finds: of a classifier with these labels, or of a language model."""
    return LANGUAGE_METRICS if labels is None else labels.metrics


def task_module(config: Config) -> ModuleType:
    """The module of the config's task."""
    return import_module(TASKS[config.task])
