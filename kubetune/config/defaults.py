"""Defaults that follow from another setting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import ValidationInfo

if TYPE_CHECKING:
    from kubetune.config.schema import TrainingConfig


def data_of_task(data: Any, info: ValidationInfo) -> Any:
    """A classifier tells a long text by its beginning, so that an evaluation counts every row."""
    if info.data.get("task") != "sequence_classification" or not isinstance(data, dict):
        return data
    return {"overlong": "truncate", **data}


def prefers_greater(training: TrainingConfig) -> bool:
    """`greater_is_better`, or what the name of the metric that chooses the best checkpoint says."""
    if training.greater_is_better is not None:
        return training.greater_is_better
    return not training.metric_for_best_model.endswith(("loss", "perplexity", "mae"))
