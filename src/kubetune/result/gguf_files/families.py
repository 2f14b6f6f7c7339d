"""The families of models that are written as GGUF: what llama.cpp calls them, and what it wants otherwise.

A family is here only if llama.cpp was run on a tiny model of it and gave what transformers gives
(tests/run/test_gguf_llama_cpp.py). All others are refused by name.

Three things differ between a model of transformers and the same model of llama.cpp:

    names     model.layers.0.self_attn.q_proj.weight → blk.0.attn_q.weight, by the tables of the library `gguf`
    rows      of q and k, in some families: transformers rotates number i of a head together with number i + d/2,
              llama.cpp rotates neighbours. With heads of 6:  0 1 2 3 4 5  →  0 3 1 4 2 5
    values    Gemma's norms multiply by 1 + weight, llama.cpp's by weight
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from kubetune import errors

if TYPE_CHECKING:
    from torch import Tensor

# Keys of GGUF without the name of the architecture that is before them, such as "attention.head_count".
Keys = dict[str, Any]

# A model's config.json with transformers' defaults filled in.
Facts = Mapping[str, Any]

# How llama.cpp reads the head, output.weight, of a model whose head is its embedding.
Head = Literal["optional", "needed", "never read"]


def _no_keys(_: Facts) -> Keys:
    return {}


def _in_place(_name: str, tensor: Tensor, _facts: Facts) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Family:
    """How a family of transformers is written for llama.cpp."""

    arch: str  # what llama.cpp calls it
    keys: Callable[[Facts], Keys] = _no_keys  # keys besides those of all families
    order: Callable[[str, Tensor, Facts], Tensor] = _in_place  # the same rows in llama.cpp's order
    norm_offset: float = 0.0  # added to the weights of norms
    transposed: bool = False  # linear layers hold [in, out], as GPT-2's do
    head: Head = "optional"
    slides: bool = False  # llama.cpp keeps to its sliding window
    acts: tuple[str, ...] = ("silu",)  # the activation that llama.cpp computes
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # the values that it computes


def heads_of(facts: Facts) -> tuple[int, int, int]:
    """Return the numbers of heads of queries and of keys, and the size of a head."""
    heads = facts.get("num_attention_heads") or facts["n_head"]
    kv_heads = facts.get("num_key_value_heads") or heads
    if facts.get("model_type") == "falcon":
        kv_heads = _falcon_kv_heads(facts)
    size = facts.get("head_dim") or _width(facts) // heads
    return heads, kv_heads, size


def _width(facts: Facts) -> int:
    """Return the number of values that stand for a token."""
    return int(facts.get("hidden_size") or facts["n_embd"])


def _falcon_kv_heads(facts: Facts) -> int:
    if facts.get("new_decoder_architecture"):
        return int(facts["num_kv_heads"])
    return 1 if facts.get("multi_query") else int(facts["num_attention_heads"])


def _neighbours(rows: Tensor, heads: int) -> Tensor:
    """Return the rows of q or k with those next to each other that are rotated together.

    Two heads of 4 rows:    0 1 | 2 3    4 5 | 6 7    →    0 2 1 3    4 6 5 7
    """
    # [heads, 2 halves, d/2] → [heads, d/2, 2]
    size = rows.shape[0] // heads
    halves = rows.reshape(heads, 2, size // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _rotated(name: str, tensor: Tensor, facts: Facts) -> Tensor:
    heads, kv_heads, _ = heads_of(facts)
    if ".q_proj." in name:
        return _neighbours(tensor, heads)
    if ".k_proj." in name:
        return _neighbours(tensor, kv_heads)
    return tensor


def _falcon_rows(name: str, tensor: Tensor, facts: Facts) -> Tensor:
    """Return q, k, v of groups (queries, one key, one value) as all queries, then all keys, then all values."""
    if "query_key_value" not in name:
        return tensor
    import torch

    # Four heads of queries and two of keys:    q q k v | q q k v    →    q q q q  k k  v v
    heads, kv_heads, size = heads_of(facts)
    queries = heads // kv_heads
    groups = tensor.reshape(kv_heads, queries + 2, size, *tensor.shape[1:])
    parts = groups.split([queries, 1, 1], dim=1)
    return torch.cat([part.flatten(0, 2) for part in parts])


def _neox_rows(name: str, tensor: Tensor, facts: Facts) -> Tensor:
    """Return q, k, v of each head as all queries, then all keys, then all values."""
    if "query_key_value" not in name:
        return tensor
    # Two heads:    q k v | q k v    →    q q  k k  v v
    heads, _, size = heads_of(facts)
    by_head = tensor.reshape(heads, 3, size, *tensor.shape[1:])
    return by_head.swapaxes(0, 1).reshape(tensor.shape)


def _pattern(facts: Facts) -> Keys:
    """Return which layers look only at a window of tokens."""
    # Three layers of Gemma 2:    sliding_attention, full_attention, sliding_attention → True, False, True
    kinds = facts.get("layer_types") or ()
    slides = [kind == "sliding_attention" for kind in kinds]
    if not any(slides) or not facts.get("sliding_window"):
        return {}
    return {
        "attention.sliding_window": facts["sliding_window"],
        "attention.sliding_window_pattern": slides,
    }


def _experts(facts: Facts) -> Keys:
    width = facts.get("moe_intermediate_size") or facts["intermediate_size"]
    keys = {"expert_feed_forward_length": width}
    shared = facts.get("shared_expert_intermediate_size")
    if shared:
        keys["expert_shared_feed_forward_length"] = shared
    return keys


def _llama_keys(facts: Facts) -> Keys:
    return {"vocab_size": facts["vocab_size"]}


def _gemma2_keys(facts: Facts) -> Keys:
    caps = {
        "attn_logit_softcapping": float(facts["attn_logit_softcapping"]),
        "final_logit_softcapping": float(facts["final_logit_softcapping"]),
    }
    return {**_pattern(facts), **caps}


def _gemma3_keys(facts: Facts) -> Keys:
    keys = _pattern(facts)
    if facts.get("final_logit_softcapping"):
        keys["final_logit_softcapping"] = float(facts["final_logit_softcapping"])
    return keys


def _granite_keys(facts: Facts) -> Keys:
    return {
        "attention.scale": float(facts["attention_multiplier"]),
        "embedding_scale": float(facts["embedding_multiplier"]),
        "residual_scale": float(facts["residual_multiplier"]),
        "logit_scale": float(facts["logits_scaling"]),
    }


def _cohere_keys(facts: Facts) -> Keys:
    return {**_pattern(facts), "logit_scale": float(facts["logit_scale"])}


def _cohere2_keys(facts: Facts) -> Keys:
    return {**_cohere_keys(facts), "rope.scaling.type": "none"}


def _falcon_keys(_: Facts) -> Keys:
    return {"tensor_data_layout": "jploski"}


def _neox_keys(facts: Facts) -> Keys:
    return {"use_parallel_residual": bool(facts["use_parallel_residual"])}


def _olmo_keys(facts: Facts) -> Keys:
    # OLMo's norms have no weights, and this epsilon, which its config does not name.
    keys: Keys = {"attention.layer_norm_epsilon": 1e-5}
    if facts.get("clip_qkv"):
        keys["attention.clamp_kqv"] = float(facts["clip_qkv"])
    return keys


_GELU: Final = ("gelu", "gelu_new", "gelu_pytorch_tanh")

# Layers of the largest model of a family, by which llama.cpp knows it.
_LARGEST_GEMMA: Final = {"gemma2": 46, "gemma3_text": 62}

# By `model_type` of transformers.
FAMILIES: Final[Mapping[str, Family]] = {
    "llama": Family("llama", _llama_keys, _rotated),
    "mistral": Family("llama", _llama_keys, _rotated),
    "mixtral": Family("llama", _llama_keys, _rotated),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "qwen2_moe": Family("qwen2moe", _experts, only={"norm_topk_prob": (False,)}),
    "qwen3_moe": Family("qwen3moe", _experts, only={"norm_topk_prob": (True,)}),
    "gemma": Family("gemma", norm_offset=1.0, head="never read", acts=_GELU),
    "gemma2": Family(
        "gemma2",
        _gemma2_keys,
        norm_offset=1.0,
        head="never read",
        slides=True,
        acts=_GELU,
    ),
    "gemma3_text": Family(
        "gemma3",
        _gemma3_keys,
        norm_offset=1.0,
        slides=True,
        acts=_GELU,
    ),
    "phi": Family(
        "phi2",
        head="needed",
        acts=_GELU,
        only={"qk_layernorm": (False,)},
    ),
    "phi3": Family("phi3"),
    "olmo": Family("olmo", _olmo_keys, _rotated),
    "olmo2": Family("olmo2", head="needed"),
    "olmo3": Family("olmo2", _pattern, head="needed", slides=True),
    "olmoe": Family(
        "olmoe",
        _experts,
        head="needed",
        only={"norm_topk_prob": (False,)},
    ),
    "granite": Family("granite", _granite_keys, _rotated),
    "falcon": Family(
        "falcon",
        _falcon_keys,
        _falcon_rows,
        acts=_GELU,
        only={"alibi": (False,), "parallel_attn": (True,)},
    ),
    "gpt2": Family("gpt2", transposed=True, acts=_GELU),
    "gpt_neox": Family("gptneox", _neox_keys, _neox_rows, head="needed", acts=_GELU),
    "starcoder2": Family("starcoder2", acts=_GELU),
    "stablelm": Family(
        "stablelm",
        _neox_keys,
        head="needed",
        only={"qk_layernorm": (False,)},
    ),
    "cohere": Family(
        "command-r",
        _cohere_keys,
        head="never read",
        only={"use_qk_norm": (False,)},
    ),
    "cohere2": Family("cohere2", _cohere2_keys, head="never read", slides=True),
    "glm4": Family("glm4"),
    "smollm3": Family("smollm3", order=_rotated, only={"no_rope_layer_interval": (4,)}),
    "exaone4": Family("exaone4", only={"sliding_window": (None,)}),
    "seed_oss": Family("seed_oss"),
    "nemotron": Family("nemotron", norm_offset=1.0, head="needed", acts=("relu2",)),
}


def family_of(facts: Facts) -> Family:
    """Return the family of a model. Raise ModelError, naming it, where llama.cpp is not known to compute it."""
    family = known_family(facts)
    _require_computed(str(facts.get("model_type")), facts, family)
    return family


def known_family(facts: Facts) -> Family:
    """Return the family that a config.json names, whose other settings are not looked at. Raise ModelError for others."""
    kind = str(facts.get("model_type"))
    if "vision_config" in facts or "audio_config" in facts:
        raise errors.ModelError(
            f"{kind} sees or hears: as GGUF it would be two files, a model and a projector (mmproj), which are not "
            "written here. Nothing was written; llama.cpp's own convert_hf_to_gguf.py takes the merged export."
        )
    family = FAMILIES.get(kind)
    if family is None:
        raise errors.ModelError(
            f"{kind} is not written as GGUF: llama.cpp was not seen to compute it as transformers does. "
            f"Written are {', '.join(sorted(FAMILIES))}. Nothing was written."
        )
    return family


def _require_computed(kind: str, facts: Facts, family: Family) -> None:
    """Raise ModelError for a setting that llama.cpp does not compute, as its code has only one value of it."""
    for name, values in family.only.items():
        if facts.get(name, values[0]) not in values:
            raise errors.ModelError(
                f"{kind} with {name}: {facts[name]} is not written as GGUF: llama.cpp computes only {values[0]}. "
                "Nothing was written."
            )
    for name in ("hidden_activation", "hidden_act", "activation_function", "activation"):
        act = facts.get(name)
        if act is not None and act not in family.acts:
            raise errors.ModelError(
                f"{kind} with {name}: {act} is not written as GGUF: llama.cpp computes only {family.acts[0]}. "
                "Nothing was written."
            )
    heads, kv_heads, size = heads_of(facts)
    if family.arch == "olmoe" and heads != kv_heads:
        raise errors.ModelError(
            f"{kind} with {kv_heads} heads of keys for {heads} of queries is not written as GGUF: llama.cpp takes as "
            "many of each. Nothing was written."
        )
    scalar = facts.get("query_pre_attn_scalar")
    if kind in _LARGEST_GEMMA and scalar is not None:
        # llama.cpp divides scores by the root of the size of a head, except of the largest model of each.
        expected = size
        if layers_of(facts) == _LARGEST_GEMMA[kind]:
            expected = _width(facts) // heads
        if scalar != expected:
            raise errors.ModelError(
                f"{kind} with query_pre_attn_scalar: {scalar} is not written as GGUF: llama.cpp takes {expected}. "
                "Nothing was written."
            )


def keys_of(facts: Facts, family: Family) -> tuple[Keys, dict[str, Tensor]]:
    """Return a model's keys, and tensors of frequencies that llama.cpp wants beside its weights.

    Raise ModelError for what llama.cpp does not compute.
    """
    heads, kv_heads, size = heads_of(facts)
    rotary, tensors = _rotary(facts, size)
    keys: Keys = {
        "block_count": layers_of(facts),
        "context_length": _context(facts, family),
        "embedding_length": _width(facts),
        "feed_forward_length": _inner(facts),
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": size,
        "attention.value_length": size,
        **_epsilon(facts),
        **rotary,
    }
    experts = facts.get("num_local_experts") or facts.get("num_experts")
    if experts:
        keys["expert_count"] = experts
        keys["expert_used_count"] = facts["num_experts_per_tok"]
    return {**keys, **family.keys(facts)}, tensors


def layers_of(facts: Facts) -> int:
    """Return the number of a model's layers."""
    return int(facts.get("num_hidden_layers") or facts["n_layer"])


def _inner(facts: Facts) -> int:
    """Return the width of the feed-forward part, which some families leave to a default."""
    for name in ("ffn_hidden_size", "intermediate_size", "n_inner"):
        if facts.get(name):
            return int(facts[name])
    return 4 * _width(facts)


def _context(facts: Facts, family: Family) -> int:
    """Return the number of tokens that the model may be asked about in llama.cpp."""
    length = int(facts.get("max_position_embeddings") or facts.get("n_positions") or 2048)
    window = facts.get("sliding_window")
    # Within its window a model that slides is the same as one that does not, and beyond it llama.cpp would be another.
    if window and not family.slides and facts.get("use_sliding_window", True):
        return min(length, int(window))
    return length


def _epsilon(facts: Facts) -> Keys:
    """Return the epsilon of norms, by the kind of norm."""
    if facts.get("rms_norm_eps") is not None:
        return {"attention.layer_norm_rms_epsilon": float(facts["rms_norm_eps"])}
    for name in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"):
        if facts.get(name) is not None:
            return {"attention.layer_norm_epsilon": float(facts[name])}
    return {}


def _rotary(facts: Facts, size: int) -> tuple[Keys, dict[str, Tensor]]:
    """Return keys and tensors of the rotary embedding."""
    parameters = facts.get("rope_parameters") or {}
    if not parameters:
        return {}, {}
    # Families whose layers differ have one set of parameters for each kind of layer:
    #     {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    full: Facts = parameters.get("full_attention") or parameters
    local = parameters.get("sliding_attention")
    share = full.get("partial_rotary_factor") or facts.get("partial_rotary_factor") or 1.0
    keys: Keys = {
        "rope.dimension_count": int(size * share),
        "rope.freq_base": float(full["rope_theta"]),
    }
    if local:
        keys["rope.freq_base_swa"] = float(local["rope_theta"])
        if local.get("rope_type", "default") != "default":
            raise _foreign_rope(local["rope_type"])

    kind = full.get("rope_type", "default")
    tensors: dict[str, Tensor] = {}
    if kind == "llama3":
        tensors["rope_freqs.weight"] = _llama3_factors(full, size)
    elif kind == "linear":
        keys["rope.scaling.type"] = "linear"
        keys["rope.scaling.factor"] = float(full["factor"])
    elif kind == "yarn":
        keys |= _yarn(full)
    elif kind != "default":
        raise _foreign_rope(kind)
    return keys, tensors


def _foreign_rope(kind: str) -> errors.ModelError:
    return errors.ModelError(
        f"rotary embeddings of the kind {kind} are not written as GGUF; written are default, linear, llama3 and yarn. "
        "Nothing was written."
    )


def _yarn(parameters: Facts) -> Keys:
    keys: Keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(parameters["factor"]),
        "rope.scaling.original_context_length": int(parameters["original_max_position_embeddings"]),
    }
    for name in ("beta_fast", "beta_slow"):
        if parameters.get(name) is not None:
            keys[f"rope.scaling.yarn_{name}"] = float(parameters[name])
    return keys


def _llama3_factors(parameters: Facts, size: int) -> Tensor:
    """Return by what each frequency is divided: not at all if it is high, by `factor` if it is low, between by both.

    The rule is that of Llama 3.1's rope_scaling (transformers/modeling_rope_utils.py).
    """
    import torch

    # Llama 3.1 (context 8192, low 1, high 4, factor 8), by the waves that a context holds:
    #
    #     waves in a context    0.5    1      2.5    4      100
    #     smooth                0      0      0.5    1      1
    #     divided by            8      8      1.78   1      1
    exponents = torch.arange(0, size, 2).double() / size
    frequencies = 1.0 / parameters["rope_theta"] ** exponents
    context = parameters["original_max_position_embeddings"]
    waves = context * frequencies / (2 * math.pi)
    low = parameters["low_freq_factor"]
    high = parameters["high_freq_factor"]
    smooth = ((waves - low) / (high - low)).clamp(0, 1)
    factors: Tensor = 1 / ((1 - smooth) / parameters["factor"] + smooth)
    return factors.float()
