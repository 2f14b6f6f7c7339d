"""Values of metrics as every page writes them, so that one number is the same text everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kubetune.base.humanize import number, share
from kubetune.config.metric_names import is_share

# What people call a metric whose name says too little.
_LABELS = {
    "eval_loss": "held-out loss",
    "reward_std": "spread of rewards",
    "divergence": "divergence from the teacher",
}


# Below it, a metric is 0 but for rounding: the margin of a model over itself comes out as -1.8e-08.
_ROUNDING = 1e-6


def measured(value: Any, metric: str) -> str:
    """Return a value of a metric: `92 %` of a share, `0.0761` of anything else, a dash for None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and abs(value) < _ROUNDING:
        value = 0
    if is_number and is_share(metric) and 0 <= value <= 1:
        return share(float(value))
    return number(value)


def interval(ends: Sequence[float], metric: str) -> str:
    """Return an interval of a metric, with its sign once: `85–95.9 %`."""
    low, high = ends
    text = f"{measured(low, metric)}–{measured(high, metric)}"
    return text.replace(" %–", "–", 1) if text.endswith("%") else text


def label_of(name: str) -> str:
    """Return what people call a metric: "exact match" for eval_exact_match."""
    key = name.removeprefix("eval_")
    return _LABELS.get(name) or _LABELS.get(key, key.replace("_", " ").replace("f1", "F1"))
