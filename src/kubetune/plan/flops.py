"""FLOPs that training must do: one count for what a plan forecasts, what a run reports, and what benchmarks compare.

Per token, with N weights in frozen linear modules and P in trained ones:

    forward 2N + 2P · gradient of the inputs 2N + 2P · gradient of the weights 2P

so a frozen weight costs 4 FLOPs a token and a trained one 6. (With 6 for all, LoRA would look half as fast again as it
is.) Attention costs 12·heads·head_dim for each pair of tokens and layer; causal attention has L(L+1)/2 pairs in a
sequence. The head is computed at tokens with a label. Only the experts that a token visits count. Padding,
recomputed activations, norms and the optimizer do not count: a trainer may need more or less of them.
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


class LinearCost(NamedTuple):
    """One linear module, or several together."""

    name: str
    weights: float  # number of them
    is_trained: bool


@dataclass(frozen=True)
class Cost:
    """FLOPs of forward and backward."""

    token: float  # for each token
    pair: float  # for each pair of tokens that attend
    label: float  # for each label

    def of(self, tokens: float, pairs: float, labels: float) -> float:
        """Return the FLOPs of this many tokens, pairs and labels."""
        return self.token * tokens + self.pair * pairs + self.label * labels

    def without_share(self, share: float) -> Cost:
        """Return the cost if this share of each row, its beginning, has been computed for other rows."""
        # The pairs inside a beginning are the square of its share: a beginning of half a row has a quarter of the pairs.
        return Cost(self.token * (1 - share), self.pair * (1 - share**2), self.label)


def cost(
    modules: Iterable[LinearCost],
    head: LinearCost | None,
    *,
    attention: float,
    layers: int,
    visited: float = 1.0,
) -> Cost:
    """Return the cost of a model with these linear modules, and a head that is computed at tokens with a label.

    `attention`: heads × their size. `visited`: share of the experts that a token visits.
    """
    token = 0.0
    for module in modules:
        # A token passes through a few of the experts, and through all of the other modules.
        share = 1.0
        if is_expert(module.name):
            share = visited
        token += _flops(module) * share
    label = 0.0
    if head is not None:
        label = float(_flops(head))
    return Cost(token, 12.0 * attention * layers, label)


def causal_pairs(length: float) -> float:
    """Return the pairs of tokens that attend in a causal sequence: each token and itself, and all before it."""
    return length * (length + 1) / 2


def visited_share(text_config: Mapping[str, Any]) -> float:
    """Return the share of the experts that a token visits, by the model's config. 1 without experts."""
    experts = 1
    # The names that families of models have for the number of experts.
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if text_config.get(name):
            experts = int(text_config[name])
            break
    return (text_config.get("num_experts_per_tok") or 1) / experts


def planned_cost(trainable: Trainable, weights: Weights, *, has_vocabulary: bool) -> Cost | None:
    """Return the cost of a model by the shapes of its weights. None if its config does not name its sizes."""
    shape = shape_of(weights)
    if shape is None:
        return None
    is_full = trainable.lora is None
    modules = [LinearCost(name, size, is_full) for name, size in _sizes(weights)]
    # Adapters are trained modules of their own. Adapters of experts are visited as rarely as the experts.
    if not is_full:
        adapters = trained_by_part(trainable, weights)
        modules.append(LinearCost("adapters", adapters.total() - adapters["experts"], True))
        modules.append(LinearCost("experts", adapters["experts"], True))
    head = None
    if has_vocabulary:
        vocabulary = int(weights.text_config.get("vocab_size") or 0)
        head = LinearCost("head", vocabulary * shape.hidden, is_full)
    visited = visited_share(weights.text_config)
    return cost(modules, head, attention=shape.attention, layers=shape.layers, visited=visited)


def _sizes(weights: Weights) -> Iterator[tuple[str, int]]:
    """Yield the name and number of weights of each linear module and stack of experts."""
    for name, rows, columns in linears(weights):
        yield name, rows * columns
    for stack in stacks(weights):
        yield stack.name, math.prod(stack[1:])


def _flops(module: LinearCost) -> float:
    """Return the FLOPs a token for all weights of a module."""
    per_weight = TRAINED if module.is_trained else FROZEN
    return per_weight * module.weights
