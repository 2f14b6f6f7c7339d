"""Sizes of a decoder that memory depends on, from the model's config: no weights, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

USABLE_SHARE = 0.92
"""Of the device, what may be planned for; the rest is fragmentation and other people's surprises."""

CHUNK_LOGITS = 2**25
"""Logits that are made at once: about so many fit caches, and memory, at any vocabulary."""
CHUNK_SHARE = 1 / 32
"""Of a GPU's memory, what a larger chunk may take: each chunk reads the whole head twice, so more rows are faster."""


def chunk_rows(vocabulary: int, gpu_bytes: int | None = None) -> int:
    """Rows that the head scores at once. `gpu_bytes`: memory of a GPU; None for CPUs.

    On a GPU up to 1,024, which its arithmetic needs to be busier than its memory. By its size alone, never by what is
    free, so that a run goes on with the same sums.
    """
    least = min(512, max(128, CHUNK_LOGITS // max(1, vocabulary)))
    if gpu_bytes is None:
        return least
    # 10 bytes each: the logits in 16 bits, log-probabilities and their gradient in fp32.
    return max(
        least, min(1024, int(CHUNK_SHARE * gpu_bytes / (10 * max(1, vocabulary))) // 64 * 64)
    )


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder that memory depends on. `attention` and `keys`: heads × their size."""

    hidden: int
    layers: int
    intermediate: int
    attention: int
    keys: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape | None:
        """Read them from a Hugging Face text config; None when it does not name them (old or unusual models)."""
        hidden = config.get("hidden_size") or config.get("n_embd") or config.get("dim")
        layers = config.get("num_hidden_layers") or config.get("n_layer") or config.get("n_layers")
        heads = config.get("num_attention_heads") or config.get("n_head") or config.get("n_heads")
        if not (hidden and layers and heads):
            return None
        head_dim = config.get("head_dim") or hidden // heads
        return cls(
            hidden=hidden,
            layers=layers,
            # Of a mixture a token passes through some experts only.
            intermediate=(config.get("moe_intermediate_size") or 0)
            * (config.get("num_experts_per_tok") or 1)
            or config.get("intermediate_size")
            or config.get("hidden_dim")
            or config.get("ffn_dim")
            or config.get("n_inner")
            or 4 * hidden,
            attention=heads * head_dim,
            keys=(config.get("num_key_value_heads") or heads) * head_dim,
        )


def activation_bytes_per_token(shape: Shape, element_bytes: int) -> int:
    """Bytes that autograd keeps for one token until the backward, where pointwise kernels are compiled.

    Per layer: two residual streams, two normalised ones, q, k, v and the attention's output, gate, up and their
    product.
    """
    kept = 4 * shape.hidden + 2 * shape.attention + 2 * shape.keys + 3 * shape.intermediate
    return shape.layers * kept * element_bytes
