"""FLOPs that training must do: one count for what a plan forecasts, what a run reports, and what benchmarks compare.

Per token, with N weights in frozen linear modules and P in trained ones:

    forward 2N + 2P · gradient of the inputs 2N + 2P · gradient of the weights 2P

so a frozen weight costs 4 FLOPs a token and a trained one 6: a figure of 6 for all would show LoRA as half as fast
again as it is. Attention costs 12·heads·head_dim for each pair of tokens and layer, of which causal attention has
L(L+1)/2 in a sequence. The head is needed where there is a label. Padding, recomputed activations, norms and the
optimizer are a trainer's own affair and not counted. Of experts only those that a token visits are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kubetune.plan.linears import (
    Trainable,
    is_expert,
    linears,
    shape_of,
    stacks,
    trained_by_part,
)
from kubetune.plan.model_shapes import Weights

FROZEN = 4  # FLOPs a weight and token
TRAINED = 6


class Linear(NamedTuple):
    """A linear module, or several: name, number of weights, and whether they are trained."""

    name: str
    weights: float
    is_trained: bool


@dataclass(frozen=True)
class Cost:
    """FLOPs of forward and backward: for each token, each pair of tokens that attend, and each label."""

    token: float
    pair: float
    label: float

    def of(self, tokens: float, pairs: float, labels: float) -> float:
        """FLOPs of so many tokens, pairs of tokens that attend, and labels."""
        return self.token * tokens + self.pair * pairs + self.label * labels

    def sparing(self, share: float) -> Cost:
        """The cost where this share of the tokens, at the beginning of rows, has been computed for other rows."""
        return Cost(self.token * (1 - share), self.pair * (1 - share**2), self.label)


def cost(
    modules: Iterable[Linear],
    head: Linear | None,
    *,
    attention: float,
    layers: int,
    visited: float = 1.0,
) -> Cost:
    """Cost of a model of these linear modules, and of a head that is computed where there is a label.

    `attention`: heads × their size. `visited`: share of the experts that a token passes through.
    """
    token = sum(_flops(each) * (visited if is_expert(each.name) else 1.0) for each in modules)
    return Cost(
        float(token), 12.0 * attention * layers, float(_flops(head)) if head is not None else 0.0
    )


def causal_pairs(length: float) -> float:
    """Pairs of tokens that attend in a sequence: each to itself and all before it."""
    return length * (length + 1) / 2


def visited_share(text_config: Mapping[str, Any]) -> float:
    """Share of the experts that a token passes through, by the model's config; 1 without experts."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((int(text_config[name]) for name in names if text_config.get(name)), 1)
    return (text_config.get("num_experts_per_tok") or 1) / experts


def planned_cost(trainable: Trainable, weights: Weights, *, has_vocabulary: bool) -> Cost | None:
    """Return the cost of a model known by the shapes of its weights; None where its config does not name its sizes."""
    shape = shape_of(weights)
    if shape is None:
        return None
    is_full = trainable.lora is None
    modules = [Linear(name, size, is_full) for name, size in _sizes(weights)]
    if not is_full:
        adapters = trained_by_part(trainable, weights)
        modules.append(Linear("adapters", adapters.total() - adapters["experts"], True))
        modules.append(Linear("experts", adapters["experts"], True))
    head = None
    if has_vocabulary:
        vocabulary = int(weights.text_config.get("vocab_size") or 0)
        head = Linear("head", vocabulary * shape.hidden, is_full)
    visited = visited_share(weights.text_config)
    return cost(modules, head, attention=shape.attention, layers=shape.layers, visited=visited)


def _sizes(weights: Weights) -> Iterator[tuple[str, int]]:
    for name, rows, columns in linears(weights):
        yield name, rows * columns
    for stack in stacks(weights):
        yield stack.name, math.prod(stack[1:])


def _flops(module: Linear) -> float:
    return (TRAINED if module.is_trained else FROZEN) * module.weights
