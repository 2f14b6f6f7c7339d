"""FLOPs of a benchmark's case, counted as kubetune counts them (src/kubetune/plan/flops.py). Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kubetune.plan.flops import LinearCost, causal_pairs, cost
from kubetune.training.gpu_specs import stated_tflops

Adapt = Literal["attention", "all-linear", "full"]

LORA_RANK = 16


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder with gated MLPs and grouped-query attention. Names are those of transformers."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool = True

    @property
    def attention_linears(self) -> list[tuple[int, int]]:
        """Return inputs and outputs of q, k, v and o."""
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        hidden = self.hidden_size
        return [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]

    @property
    def linears(self) -> list[tuple[int, int]]:
        """Return inputs and outputs of every linear module of one layer."""
        hidden = self.hidden_size
        inner = self.intermediate_size
        return [*self.attention_linears, (hidden, inner), (hidden, inner), (inner, hidden)]


def linear_parameters(shape: Shape) -> int:
    """Return the number of weights of the layers' linear modules, without embeddings and head."""
    return shape.num_hidden_layers * sum(inputs * outputs for inputs, outputs in shape.linears)


def lora_parameters(shape: Shape, adapt: Adapt, rank: int = LORA_RANK) -> int:
    """Return the number of weights of the adapters."""
    adapted = {"attention": shape.attention_linears, "all-linear": shape.linears, "full": []}[adapt]
    return shape.num_hidden_layers * rank * sum(inputs + outputs for inputs, outputs in adapted)


def training_flops(shape: Shape, adapt: Adapt, lengths: Sequence[int], labels: int) -> float:
    """Return the FLOPs of forward and backward over sequences of these lengths with `labels` labels in all."""
    is_full = adapt == "full"
    flops = cost(
        [
            LinearCost("base", linear_parameters(shape), is_full),
            LinearCost("adapters", lora_parameters(shape, adapt), True),
        ],
        LinearCost("head", shape.hidden_size * shape.vocab_size, is_full),
        attention=shape.num_attention_heads * shape.head_dim,
        layers=shape.num_hidden_layers,
    )
    return flops.of(sum(lengths), sum(map(causal_pairs, lengths)), labels)


def peak_flops(device: str) -> float | None:
    """Return the FLOP/s that the vendor states for a device of this name; None if it is not known."""
    tflops = stated_tflops(device)
    return None if tflops is None else tflops * 1e12
