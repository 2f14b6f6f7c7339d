"""Sizes of a decoder that memory depends on, from the model's config: no weights, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Share of a device that a plan may use. The rest is for fragmentation and for other programs.
USABLE_SHARE = 0.92

# A frozen base in parts is gathered to draw answers on GPUs that have room for so many of it.
ROOM_TO_DRAW = 1.5

# Logits that are made at once on a CPU. About this many fit into caches, with any vocabulary.
CHUNK_LOGITS = 2**25
# Share of a GPU's memory that a chunk may take. Each chunk reads the whole head twice, so larger chunks are faster.
CHUNK_SHARE = 1 / 32


def chunk_rows(vocabulary: int, gpu_bytes: int | None = None) -> int:
    """Return the rows that the head scores at once. `gpu_bytes`: memory of a GPU; None for a CPU.

    It depends on the size of a GPU, never on what is free, so that a run that continues computes the same sums.
    """
    least = min(512, max(128, CHUNK_LOGITS // max(1, vocabulary)))
    if gpu_bytes is None:
        return least
    # 10 bytes a logit: 2 for itself, 4 for its log-probability and 4 for the gradient of that. From 1,024 rows on, a
    # GPU's arithmetic is busier than its memory.
    fitting = int(CHUNK_SHARE * gpu_bytes / (10 * max(1, vocabulary)))
    in_steps_of_64 = fitting // 64 * 64
    return max(least, min(1024, in_steps_of_64))


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder that memory depends on."""

    hidden: int
    layers: int
    intermediate: int  # width of the feed-forward; of a mixture, of all experts that a token visits
    attention: int  # heads × their size
    keys: int  # heads of keys × their size

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape | None:
        """Read the sizes from a Hugging Face text config. None if it does not name them (old or unusual models)."""
        hidden = config.get("hidden_size") or config.get("n_embd") or config.get("dim")
        layers = config.get("num_hidden_layers") or config.get("n_layer") or config.get("n_layers")
        heads = config.get("num_attention_heads") or config.get("n_head") or config.get("n_heads")
        if not (hidden and layers and heads):
            return None
        head_dim = config.get("head_dim") or hidden // heads
        return cls(
            hidden=hidden,
            layers=layers,
            intermediate=_intermediate(config) or 4 * hidden,
            attention=heads * head_dim,
            keys=(config.get("num_key_value_heads") or heads) * head_dim,
        )


def _intermediate(config: Mapping[str, Any]) -> Any:
    """Return the width of the feed-forward that a config names, if any."""
    of_expert = config.get("moe_intermediate_size")
    if of_expert:
        return of_expert * (config.get("num_experts_per_tok") or 1)
    for key in ("intermediate_size", "hidden_dim", "ffn_dim", "n_inner"):
        if config.get(key):
            return config[key]
    return None


def activation_bytes_per_token(shape: Shape, element_bytes: int) -> int:
    """Return the bytes that autograd keeps for one token until the backward, if pointwise kernels are compiled."""
    # In each layer: two residual streams and two normalised ones (hidden); q and the attention's output (attention);
    # k and v (keys); gate, up and their product (intermediate).
    kept = 4 * shape.hidden + 2 * shape.attention + 2 * shape.keys + 3 * shape.intermediate
    return shape.layers * kept * element_bytes
