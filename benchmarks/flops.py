"""FLOPs that training needs, aware of LoRA. Arithmetic only.

Per token, with N parameters in the layers' linear modules and P in the adapters on them:

    forward 2N + 2P · gradient of the inputs 2N + 2P · gradient of the weights 2P (LoRA) or 2N (full)

so LoRA needs 4N + 6P where full fine-tuning needs 6N. Attention: a token attends to itself and all before it in its
sequence; each such pair costs 4·heads·head_dim forward and twice that backward, in every layer. The head, hidden ×
vocabulary, is needed for labels only: 4 FLOPs per weight and label with LoRA, 6 with full fine-tuning. Recomputed
activations, padding, masked attention and logits of unlabelled tokens are a trainer's own affair and not counted, nor
are norms, activations and the optimizer. The gradient of the inputs of the first layer is counted, though LoRA needs
only a part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Adapt = Literal["attention", "all-linear", "full"]

LORA_RANK = 16
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bf16 FLOP/s that the vendor states, by a part of the device's name."""


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
        """(inputs, outputs) of q, k, v and o."""
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        hidden = self.hidden_size
        return [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of every linear module of one layer."""
        hidden, inner = self.hidden_size, self.intermediate_size
        return [*self.attention_linears, (hidden, inner), (hidden, inner), (inner, hidden)]


def linear_parameters(shape: Shape) -> int:
    """N: weights of the layers' linear modules, without embeddings and head."""
    return shape.num_hidden_layers * sum(inputs * outputs for inputs, outputs in shape.linears)


def lora_parameters(shape: Shape, adapt: Adapt, rank: int = LORA_RANK) -> int:
    """P: weights of the adapters."""
    adapted = {"attention": shape.attention_linears, "all-linear": shape.linears, "full": []}[adapt]
    return shape.num_hidden_layers * rank * sum(inputs + outputs for inputs, outputs in adapted)


def training_flops(shape: Shape, adapt: Adapt, lengths: Sequence[int], labels: int) -> float:
    """FLOPs of forward and backward over sequences of these lengths with `labels` labels in all."""
    tokens, pairs = sum(lengths), sum(length * (length + 1) // 2 for length in lengths)
    passes = 6 if adapt == "full" else 4
    linear = passes * linear_parameters(shape) + 6 * lora_parameters(shape, adapt)
    attention = 12 * shape.num_attention_heads * shape.head_dim * shape.num_hidden_layers
    head = passes * shape.hidden_size * shape.vocab_size
    return float(linear * tokens + attention * pairs + head * labels)


def peak_flops(device: str) -> float | None:
    """What the vendor states for a device of this name, if known."""
    return next((peak for name, peak in PEAKS.items() if name in device), None)
