"""Memory of activations: what autograd keeps of a micro-batch, and how many layers run again in the backward to fit.

`kubetune plan` and a run that begins ask here with the same facts, so that a run does what was planned.

Worked example, by hand: Qwen2.5-7B (28 layers, hidden 3,584, intermediate 18,944, 28 heads of 128, 4 of them for keys),
LoRA in bf16, batch 8 × 2,048 = 16,384 tokens, compiled kernels:

    a layer keeps of a token      4·3,584 + 2·3,584 + 2·512 + 3·18,944 = 79,360 values of 2 bytes
    all layers, all tokens        28 · 158,720 · 16,384                = 67.8 GiB
    each layer that runs again    gives back all of this but its input: 158,720 − 2·3,584 bytes a token = 2.3 GiB

The counts follow "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), with fused
attention, which never keeps probabilities.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from kubetune.plan.linears import adapted_linears, adapted_stacks, stacks
from kubetune.plan.memory import Shape, activation_bytes_per_token
from kubetune.plan.model_shapes import Weights
from kubetune.plan.rank_work import RankWork

# Floating-point operations from which compiling pays: some minutes of training on two cores, or on a GPU.
WORTH_COMPILING = {"cpu": 5e13, "cuda": 5e15}

LAYER_NORM = re.compile(r"(norm|layernorm|ln_\w+)\d?\.bias$", re.IGNORECASE)
NORM_OF_A_LAYER = re.compile(r"\.0\.(\w*(norm|ln_)\w*)\.weight$", re.IGNORECASE)
FUSED_ATTENTION = re.compile(r"\.(qkv_proj|query_key_value|c_attn|Wqkv)\.")
GATED = re.compile(r"gate|\.w3\.|\.Wi\.")
# Copies that autograd keeps of the input and of the steps of an activation of transformers; of others, which are one
# kernel, it keeps one.
KEPT_OF_ACTIVATION = {
    **dict.fromkeys(("relu", "sigmoid", "tanh", "linear"), 0),
    **dict.fromkeys(("quick_gelu", "gelu_10"), 2),
    "gelu_python": 3,
    **dict.fromkeys(("gelu_new", "gelu_accurate", "gelu_python_tanh", "xielu"), 4),
    "gelu_fast": 7,
}


@dataclass(frozen=True)
class Activations:
    """The tensors that autograd keeps until the backward."""

    parts: Mapping[str, int]  # bytes by name
    recomputed_layers: int  # layers that run again in the backward


def operations(parameters: int, tokens: float) -> float:
    """Return the floating-point operations that decide whether compiling pays."""
    # Forward and the gradient of the inputs; frozen weights need no gradient.
    return 4.0 * parameters * tokens


def is_worth_compiling(
    parameters: int,
    tokens: float,
    device: str,
    least: float | None = None,
) -> bool:
    """Decide `training.compile: auto` for so many parameters and tokens, if a compiler is installed.

    `least`: operations from which it paid, if that was measured on the machine.
    """
    if least is None:
        least = WORTH_COMPILING[device]
    return operations(parameters, tokens) >= least


def expects_compiling(work: RankWork, parameters: int) -> bool:
    """True if a run will compile its pointwise kernels. On a GPU a compiler is taken to be installed."""
    if work.device == "cpu":
        return work.compile is True
    if work.is_sharded and work.lora is None:  # slices of weights are not compiled
        return False
    if work.compile != "auto":
        return bool(work.compile)
    return work.run_tokens is None or is_worth_compiling(parameters, work.run_tokens, work.device)


def activations(
    work: RankWork,
    weights: Weights,
    shape: Shape,
    *,
    room: int | None,
    logits: int,
    compiled: bool,
) -> Activations:
    """Return what autograd keeps, with as few layers recomputed as fit into `room` bytes.

    The gradients of the layer that the backward is in come when the `logits` are gone: only what they need
    beyond these bytes counts.
    """
    tokens = work.batch_tokens
    if goes_alone(work, weights):
        tokens = work.row_tokens
    # Bytes that all layers keep until the backward, as if none ran again.
    kept = _kept_bytes(work, weights, shape, tokens, compiled)
    attention = _attention_bytes(work, weights, shape, tokens)
    one_layer = (kept + attention) // shape.layers

    # Gradients of gate, up, SiLU's output and the product, and of what the layer hands on.
    gradients = tokens * work.element * (4 * shape.intermediate + 3 * shape.hidden)
    input_bytes = tokens * shape.hidden * work.element
    saved = kept // shape.layers - input_bytes
    # Without a known device nothing is missing, so no layer recomputes.
    missing = 0
    if room is not None:
        missing = kept + one_layer - room
    recomputed = _recomputed_layers(work, shape.layers, missing, saved)
    if not recomputed:
        parts = {"activations": kept, "attention": attention}
    else:
        # The layers that run again are the first ones. Their turn comes when what the others kept is free, but at
        # least one layer is kept whole: the one that runs again.
        whole = max(1, shape.layers - recomputed)
        if whole == 1:
            # Running a layer again leaves blocks that its gradients do not fit into, as measured.
            gradients = 2 * one_layer
        parts = {
            f"activations, {recomputed} of {shape.layers} layers recomputed": whole * one_layer,
            "inputs of those layers": recomputed * input_bytes,
        }
    parts["gradients of one layer's activations"] = max(0, gradients - logits)
    return Activations(parts, recomputed)


def _recomputed_layers(work: RankWork, layers: int, missing: int, saved: int) -> int:
    """Return the number of layers that recompute. `missing`: bytes; `saved`: bytes that each layer gives back."""
    if work.recompute is False:
        return 0
    if work.recompute != "auto":
        return layers
    if work.device == "cpu" or missing <= 0:
        return 0
    # With 5 GiB missing and 2.3 GiB of each layer it takes 3 layers.
    needed = math.ceil(missing / max(1, saved))
    return min(layers, needed)


def _kept_bytes(work: RankWork, weights: Weights, shape: Shape, tokens: int, compiled: bool) -> int:
    """Return what all layers keep besides the probabilities and masks of attention."""
    if compiled:
        kept = tokens * activation_bytes_per_token(shape, work.element)
    else:
        kept = tokens * shape.layers * _kept_by_plain_layer(work, weights, shape)

    # Further bytes of a token in a layer.
    values = 0
    if any(FUSED_ATTENTION.search(name) for name in weights.shapes):
        # The values are a part of one product, which stays whole with queries and keys that nothing else needs.
        values += shape.attention + shape.keys
    if goes_alone(work, weights) and _is_masked(weights):
        values += 2 * (shape.attention - shape.keys)  # keys and values are repeated for every head
    return kept + tokens * shape.layers * values * work.element


def _kept_by_plain_layer(work: RankWork, weights: Weights, shape: Shape) -> int:
    """Return the bytes a token that a layer keeps if its norms and activation are torch's own kernels.

    They are: what goes into a norm, in fp32; if its weight is trained, what it made before that; what the two norms
    before attention and feed-forward give; queries, keys, values and what attention gives; the wide part.
    """
    element = work.element
    norm_element = 4
    if work.lora is None:
        norm_element += element
    if any(LAYER_NORM.search(name) for name in weights.shapes):
        norm_element = element  # one kernel, which keeps its input

    norms = set()
    for name in weights.shapes:
        if match := NORM_OF_A_LAYER.search(name):
            norms.add(match[1])
    kept = max(2, len(norms)) * shape.hidden * norm_element
    kept += 2 * shape.hidden * element
    if any("q_norm" in name for name in weights.shapes):
        kept += (shape.attention + shape.keys) * norm_element
    wide = _copies_of_wide(weights) * shape.intermediate
    kept += (2 * shape.attention + 2 * shape.keys + wide) * element

    experts = int(weights.text_config.get("num_experts_per_tok") or 1)
    if list(stacks(weights)):
        # Each expert has a copy of the token, sorted by expert, and its output before and after sorting.
        kept += 3 * experts * shape.hidden * element
    if work.lora:
        modules = len(list(adapted_linears(work.trainable, weights)))
        modules += experts * len(list(adapted_stacks(work.lora, weights)))
        kept += work.lora.r * modules * element // shape.layers
    return kept


def goes_alone(work: RankWork, weights: Weights) -> bool:
    """True if each sequence is a micro-batch: as asked for, or because images are no grids of patches.

    Towers that see grids are also for videos, so their patches have a third side.
    """
    tower = weights.config.get("vision_config")
    is_grid = isinstance(tower, Mapping) and "temporal_patch_size" in tower
    if work.sees and not is_grid:
        return True
    return work.attention in ("eager", "sdpa")


def _is_masked(weights: Weights) -> bool:
    """True if a model's attention has masks that are more than causal: a window, or images read in both directions."""
    kind = str(weights.config.get("model_type"))
    return bool(weights.text_config.get("sliding_window")) or "gemma" in kind


def _attention_bytes(work: RankWork, weights: Weights, shape: Shape, tokens: int) -> int:
    """Return the bytes of masks, or of probabilities if attention is not a fused kernel."""
    if not goes_alone(work, weights):
        return 0
    # A token looks at all of its sequence: 2 sequences of 4 tokens have 8 × 4 pairs.
    pairs = tokens * min(work.sequence_tokens, tokens)
    if work.attention != "eager":
        if not _is_masked(weights):
            return 0
        return shape.layers * pairs * work.element

    text = weights.text_config
    heads = int(text.get("num_attention_heads") or text.get("n_head") or 1)
    copies = 1
    if text.get("attn_logit_softcapping"):
        copies *= 2  # the scores before the cap
    if any(
        text.get(key) for key in ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")
    ):
        copies *= 3  # the mask of dropout, and its output
    return shape.layers * heads * pairs * copies * work.element


def _copies_of_wide(weights: Weights) -> int:
    """Return how many values a layer keeps for each of its wide part: activation, gate, up and product."""
    act = ""
    for key in ("activation_function", "activation", "hidden_activation", "hidden_act"):
        act = str(weights.text_config.get(key) or act)
    copies = KEPT_OF_ACTIVATION.get(act, 1)
    if any(GATED.search(name) for name in weights.shapes):
        return copies + 3
    return copies + 1
