"""How much memory a run needs on one device, by arithmetic on the model's config: no weights, no torch.

The numbers are estimates for the padding-free route: what autograd keeps of each layer, the weights, the trained
parameters with their state, and the buffers of the loss. They decide `gradient_checkpointing: auto`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# AdamW in fp32: parameter, gradient and two moments.
BYTES_PER_TRAINED_PARAMETER = 16
# CUDA context, library workspaces, the loss's buffers and what the allocator loses between blocks.
FIXED_BYTES = 2 * 2**30
# Share of the device that may be planned for; the rest is fragmentation and other people's surprises.
USABLE_SHARE = 0.92


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
            intermediate=(config.get("moe_intermediate_size") or 0) * (config.get("num_experts_per_tok") or 1)
            or config.get("intermediate_size")
            or config.get("hidden_dim")
            or config.get("ffn_dim")
            or config.get("n_inner")
            or 4 * hidden,
            attention=heads * head_dim,
            keys=(config.get("num_key_value_heads") or heads) * head_dim,
        )


def activation_bytes_per_token(shape: Shape, element_bytes: int, *, recompute: bool, fused: bool) -> int:
    """What autograd keeps for one token until the backward.

    Without recomputation, per layer: two residual streams, two normalised ones, q, k, v and the attention's output,
    gate, up and their product. Norms that are not fused keep fp32 copies too. With recomputation: each layer's input,
    and one layer in full while it is run again.
    """
    kept = 4 * shape.hidden + 2 * shape.attention + 2 * shape.keys + 3 * shape.intermediate
    layer = kept * element_bytes
    if not fused:
        layer += 2 * 2 * shape.hidden * 4 + shape.intermediate * element_bytes
    if recompute:
        return shape.layers * shape.hidden * element_bytes + layer
    return shape.layers * layer


def layers_to_recompute(
    shape: Shape,
    *,
    weight_bytes: int,
    trained_parameters: int,
    tokens: int,
    element_bytes: int,
    device_bytes: int,
    fused: bool,
) -> int:
    """How many layers must run again in the backward for a micro-batch of `tokens` to fit: as few as will do.

    They are the first layers, whose turn in the backward comes when the others' activations are already freed.
    """
    state = trained_parameters * BYTES_PER_TRAINED_PARAMETER
    left = int(USABLE_SHARE * device_bytes) - weight_bytes - state - FIXED_BYTES
    whole = tokens * activation_bytes_per_token(shape, element_bytes, recompute=False, fused=fused)
    if whole <= left:
        return 0
    # A layer that is run again keeps its input only.
    saved = whole // shape.layers - tokens * shape.hidden * element_bytes
    return min(shape.layers, -(-(whole - left) // max(1, saved)))
