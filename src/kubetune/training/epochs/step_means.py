"""Means over steps: of the loss, by labels, and of what tells how a task goes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kubetune.config.metric_names import TELLING
from kubetune.rundir import metrics


class StepMeans:
    """Means over the steps since the beginning, or since `clear`."""

    def __init__(self) -> None:
        self.steps = 0
        self._labels = 0
        # Losses times labels: steps differ in their labels, and each label counts once.
        self._losses: list[float] = []
        self._measures: dict[str, list[float]] = {}

    def add(self, values: Mapping[str, Any]) -> None:
        """Note the values of a step, as metrics.jsonl has them."""
        self.steps += 1
        self._labels += values["trained_tokens"]
        self._losses.append(values["loss"] * values["trained_tokens"])
        for name in TELLING:
            if metrics.is_number(values.get(name)):
                self._measures.setdefault(name, []).append(values[name])

    def loss(self) -> float | None:
        """Return the mean loss of a label, None without steps."""
        if not self.steps:
            return None
        return math.fsum(self._losses) / max(self._labels, 1)

    def measures(self) -> dict[str, float]:
        """Return the means over the steps that have a measure, by its name."""
        means = {}
        for name, values in self._measures.items():
            means[name] = math.fsum(values) / len(values)
        return means

    def clear(self) -> None:
        """Forget the steps."""
        self.__init__()  # type: ignore[misc]
