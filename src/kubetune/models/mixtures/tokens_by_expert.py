"""How many tokens each expert of a mixture got: of one step in a few numbers, of all steps in a file."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from kubetune.base.files import write_atomic
from kubetune.rundir import metrics


@dataclass
class ExpertLoad:
    """Tokens that each expert got since this start, of all ranks."""

    layers: tuple[str, ...] = ()  # names of the stacks of experts
    steps: int = 0
    # [layers][experts]; empty before the first step
    tokens: list[list[int]] = field(default_factory=list)

    def add(self, counts: list[list[int]]) -> dict[str, float]:
        """Add the tokens of a step, `[layers][experts]`. Return its load in a few numbers, as `summary` does."""
        self.steps += 1
        if not self.tokens:
            self.tokens = [[0] * len(layer) for layer in counts]
        for total, layer in zip(self.tokens, counts, strict=True):
            for expert, count in enumerate(layer):
                total[expert] += count
        return summary(counts)

    def write(self, run_dir: Path, step: int) -> None:
        """Write the load of the steps up to `step`, if any step has been counted."""
        if not self.tokens:
            return
        content = {
            "steps": [step - self.steps + 1, step],
            "dropped_tokens": 0,
            "layers": dict(zip(self.layers, self.tokens, strict=True)),
        }
        write_atomic(run_dir / metrics.EXPERTS, json.dumps(content) + "\n")


def summary(counts: list[list[int]]) -> dict[str, float]:
    """Return the load of experts `[layers][experts]` in a few numbers.

        expert_load_max    of the fullest expert, as a multiple of the mean, in the worst layer
        expert_load_cv     standard deviation over mean, the layers' mean
        experts_unused     share of all experts that no token went to
        dropped_tokens     none: transformers gives experts no capacity that could be exceeded

    Of the layers [4, 4, 4, 4] and [16, 0, 0, 0] they are 4, (0 + √3) / 2, 3 / 8 and 0.
    """
    maxima = []  # of each layer
    spreads = []
    unused = 0
    number_of_experts = 0
    for layer in counts:
        # 1 if no token went through the layer, as 0 would divide by 0.
        mean = math.fsum(layer) / len(layer) or 1.0
        variance = math.fsum((count - mean) ** 2 for count in layer) / len(layer)
        maxima.append(max(layer) / mean)
        spreads.append(math.sqrt(variance) / mean)
        unused += layer.count(0)
        number_of_experts += len(layer)

    return {
        "expert_load_max": max(maxima),
        "expert_load_cv": math.fsum(spreads) / len(spreads),
        "experts_unused": unused / number_of_experts,
        "dropped_tokens": 0,
    }
