"""Memory of activations: what autograd keeps of a micro-batch, and how many layers run again in the backward to fit.

`kubetune plan` and a run that begins ask here, with the same facts, so that a run does what was planned.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kubetune.config.schema import Config
from kubetune.plan.linears import adapted_linears, adapted_stacks, stacks
from kubetune.plan.memory import Shape, activation_bytes_per_token
from kubetune.plan.model_shapes import Weights
from kubetune.plan.plan import Plan

WORTH_COMPILING = {"cpu": 5e13, "cuda": 5e15}
"""Floating-point operations from which compiling pays: some minutes of training on two cores, or on a GPU."""

EXACT_ROWS = 256
LONG_ROW = 1024
"""Block attention keeps the probabilities of blocks of so many queries; beyond LONG_ROW tokens nothing is kept."""

LAYER_NORM = re.compile(r"(norm|layernorm|ln_\w+)\d?\.bias$", re.IGNORECASE)
NORM_OF_A_LAYER = re.compile(r"\.0\.(\w*(norm|ln_)\w*)\.weight$", re.IGNORECASE)
FUSED_ATTENTION = re.compile(r"\.(qkv_proj|query_key_value|c_attn|Wqkv)\.")
GATED = re.compile(r"gate|\.w3\.|\.Wi\.")
KEPT_OF_ACTIVATION = {
    **dict.fromkeys(("relu", "sigmoid", "tanh", "linear"), 0),
    **dict.fromkeys(("quick_gelu", "gelu_10"), 2),
    "gelu_python": 3,
    **dict.fromkeys(("gelu_new", "gelu_accurate", "gelu_python_tanh", "xielu"), 4),
    "gelu_fast": 7,
}
"""Copies that autograd keeps of what goes into an activation of transformers, and of steps within it; of others one.
Those of one kernel keep what they are given, or only what they give."""


def operations(parameters: int, tokens: float) -> float:
    """Floating-point operations by which runs are compared where it is asked whether compiling pays."""
    return (
        4.0 * parameters * tokens
    )  # forward and the gradient of the inputs; frozen weights need none of their own


def is_worth_compiling(
    parameters: int, tokens: float, device: str, least: float | None = None
) -> bool:
    """Decision of `training.compile: auto` for so many parameters and tokens, where a compiler is there.

    `least`: operations from which it paid where it was measured on the machine.
    """
    return operations(parameters, tokens) >= (WORTH_COMPILING[device] if least is None else least)


def expects_compiling(config: Config, plan: Plan, weights: Weights) -> bool:
    """Forecast of whether a run compiles its pointwise kernels; on a GPU a compiler is taken to be there."""
    setting = config.training.compile
    if plan.device == "cpu":
        return setting is True
    if config.training.parallelism == "fsdp":  # slices of weights are not compiled
        return False
    if setting != "auto":
        return bool(setting)
    tokens = plan.tokens_per_step
    return tokens is None or is_worth_compiling(
        weights.parameters, tokens * plan.num_steps, plan.device
    )


def activations(
    config: Config,
    plan: Plan,
    weights: Weights,
    *,
    tokens: int,
    element: int,
    left: int | None,
    logits: int,
    compiled: bool,
) -> tuple[dict[str, int], int]:
    """Bytes by part that autograd keeps until the backward, with the gradients of the layer that the backward is in;
    and the number of layers that recompute: as few as will do in the `left` bytes.

    On a GPU those gradients come when the `logits` are gone, so only what they need beyond that room counts.
    """
    shape = Shape.of(weights.text_config)
    assert shape is not None
    logits = logits if plan.device == "cuda" else 0
    if compiled:
        kept = tokens * activation_bytes_per_token(shape, element)
    else:
        kept = tokens * shape.layers * _kept_by_plain_layer(config, weights, shape, element)
    if any(FUSED_ATTENTION.search(name) for name in weights.shapes):
        # The values are a part of one product, which stays whole with queries and keys that nothing else needs.
        kept += tokens * shape.layers * (shape.attention + shape.keys) * element
    attention = _attention_bytes(config, plan, weights, shape, tokens, element)
    if goes_alone(config, weights) and _is_masked(weights):
        kept += (
            tokens * shape.layers * 2 * (shape.attention - shape.keys) * element
        )  # keys and values for every head
    if plan.device == "cpu" and _dropouts(weights)[1]:
        kept += tokens * shape.layers * 2 * shape.hidden * element  # of two products
    a_layer = (kept + attention) // shape.layers
    setting = config.training.gradient_checkpointing
    recomputed = shape.layers if setting is True else 0
    if setting == "auto" and plan.device == "cuda" and left is not None and kept + a_layer > left:
        saved = kept // shape.layers - tokens * shape.hidden * element
        recomputed = min(shape.layers, -(-(kept + a_layer - left) // max(1, saved)))
    # Of gate, up, what SiLU and their product gave, and of what a layer is handed on.
    gradients = tokens * element * (4 * shape.intermediate + 3 * shape.hidden)
    gradients_beside = {"gradients of one layer's activations": max(0, gradients - logits)}
    if not recomputed:
        return {"activations": kept, "attention": attention, **gradients_beside}, 0
    # What is kept whole, at least the one layer that runs again, and the inputs of the others.
    whole = max(1, shape.layers - recomputed)
    if whole == 1:
        # Running a layer again leaves blocks behind that its gradients do not fit into; as measured on a CPU.
        gradients_beside = {"gradients of one layer's activations": max(0, 2 * a_layer - logits)}
    # Those that run again are the first ones: their turn comes when what the others kept is free.
    return {
        f"activations, {recomputed} of {shape.layers} layers recomputed": whole * a_layer,
        "inputs of those layers": recomputed * tokens * shape.hidden * element,
        **gradients_beside,
    }, recomputed


def _kept_by_plain_layer(config: Config, weights: Weights, shape: Shape, element: int) -> int:
    """Bytes a token that a layer keeps whose norms and activation are torch's own kernels, one after the other.

    What goes into a norm, in fp32; where its weight is trained, what it made before that; and what the two norms
    before attention and the wide part give. Queries, keys, values and what attention gives.
    """
    names = {found[1] for name in weights.shapes if (found := NORM_OF_A_LAYER.search(name))}
    is_plain = any(
        LAYER_NORM.search(name) for name in weights.shapes
    )  # one kernel, which keeps what it is given
    trained = config.lora is None

    def norm(width: int) -> int:
        return width * (element if is_plain else 4 + element * trained)

    norms = max(2, len(names)) * norm(shape.hidden) + 2 * shape.hidden * element
    if any("q_norm" in name for name in weights.shapes):
        norms += norm(shape.attention + shape.keys)
    inner = (
        2 * shape.attention + 2 * shape.keys + _kept_of_wide(weights) * shape.intermediate
    ) * element
    choices = int(weights.text_config.get("num_experts_per_tok") or 1)
    low = 0
    if config.lora:
        adapted = sum(1 for _ in adapted_linears(config, weights))
        low = config.lora.r * (adapted + choices * sum(1 for _ in adapted_stacks(config, weights)))
    # Of a token's experts each has a copy of it, sorted by expert, and what it made of it, before and after sorting.
    copies = 3 * choices * shape.hidden * element if any(True for _ in stacks(weights)) else 0
    return norms + inner + copies + low * element // shape.layers


def goes_alone(config: Config, weights: Weights) -> bool:
    """One sequence at a time, each a micro-batch of its own: as asked for, or because images are no grids of patches.

    The towers that see grids are those for videos as well, whose patches have a third side.
    """
    tower = weights.config.get("vision_config")
    is_grid = isinstance(tower, Mapping) and "temporal_patch_size" in tower
    return config.model.attention in ("eager", "sdpa") or (config.sees and not is_grid)


def _is_masked(weights: Weights) -> bool:
    """Masks of a model's own attention that are more than causal: of a window, or of images read in both directions."""
    return bool(weights.text_config.get("sliding_window")) or "gemma" in str(
        weights.config.get("model_type")
    )


def _attention_bytes(
    config: Config, plan: Plan, weights: Weights, shape: Shape, tokens: int, element: int
) -> int:
    """Probabilities that attention keeps for each head, or masks where a kernel keeps nothing else."""
    heads = int(
        weights.text_config.get("num_attention_heads") or weights.text_config.get("n_head") or 1
    )
    is_alone = goes_alone(config, weights)
    if is_alone:
        pairs = tokens * min(config.data.max_length, tokens)
        if config.model.attention != "eager":
            return shape.layers * pairs * element if _is_masked(weights) else 0
    elif plan.device != "cpu":
        return 0
    elif _dropouts(weights)[0]:
        length = min(config.data.max_length, tokens)
        pairs = few_values(tokens // length) * few_values(length) ** 2
    else:
        pairs = _pairs(config, plan, tokens)
    attention = shape.layers * heads * pairs * element
    if weights.text_config.get("attn_logit_softcapping"):
        attention *= 2  # the scores as they were bent are kept beside the probabilities
    if _dropouts(weights)[0]:
        attention *= 3  # what dropped them, in their dtype, and what it left
    return attention


def _dropouts(weights: Weights) -> tuple[float, float]:
    """Shares of the attention's probabilities, and of what layers give, that a model drops in training."""
    text = weights.text_config
    of_attention, of_hidden = (
        next((float(text[name]) for name in names if text.get(name)), 0.0)
        for names in (
            ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop"),
            ("hidden_dropout_prob", "hidden_dropout", "resid_pdrop", "dropout"),
        )
    )
    return of_attention, of_hidden


def _kept_of_wide(weights: Weights) -> int:
    """Copies of its wide part that a layer keeps: of the activation, what it gives, and with a gate up and product."""
    names = ("hidden_act", "hidden_activation", "activation", "activation_function")
    act = next(
        (str(weights.text_config[name]) for name in names if weights.text_config.get(name)), ""
    )
    return KEPT_OF_ACTIVATION.get(act, 1) + (
        3 if any(GATED.search(name) for name in weights.shapes) else 1
    )


def _pairs(config: Config, plan: Plan, tokens: int) -> int:
    """Probabilities that block attention keeps for each head on CPUs, for rows of the longest kind.

    Beginnings are taken to be shared by all rows of a step alike: what is a row's own also sees the beginning.
    """
    length = min(config.data.max_length, tokens)
    if length > LONG_ROW:
        return 0
    rows = max(2, plan.global_batch_size // plan.world_size)
    shared = min(length - 1, round(plan.spared_share * length * rows / (rows - 1)))
    own = length - shared
    return _triangle(shared) + (tokens - shared) // own * (_triangle(own) + own * shared)


def few_values(n: int) -> int:
    """`n` rounded up to three significant bits: at most a quarter more, and four values for each power of two.

    So sequences and their number are padded where attention drops probabilities, or is not causal.
    """
    step = 1 << max(0, n.bit_length() - 3)
    return -(-n // step) * step


def _triangle(length: int) -> int:
    """Pairs of a sequence's tokens with those before them, in blocks of EXACT_ROWS."""
    firsts = range(0, length, EXACT_ROWS)
    return sum(
        min(EXACT_ROWS, length - first) * min(first + EXACT_ROWS, length) for first in firsts
    )
