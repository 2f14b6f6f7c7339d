"""Tiny configurations of whatever else transformers can train to write text, all by the same few names and numbers."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import CONFIG_MAPPING

from tests.architectures import COMMON, SMALL_EXPERTS
from tests.hybrids import KIMI

# Sizes by all their names; a family gets those that its configuration has.
GENERAL: dict[str, Any] = {
    **KIMI,
    **COMMON,
    **SMALL_EXPERTS,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "q_lora_rank": 16,
    "first_k_dense_replace": 1,
    "sliding_window": 9,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
    "dff": 96,
}
ROTARY = {"rope_type": "default", "rope_theta": 10_000.0}
LATENT = {"num_key_value_heads": 4}
_PLAIN = (
    "afmoe", "apertus", "apertus1p5_text", "arcee", "aria_text", "biogpt", "bitnet", "cohere2_moe", "ctrl", "cwm", "dots1",
    "ernie4_5_moe", "exaone", "exaone_moe", "flex_olmo", "flint", "gemma4_unified_text", "glm", "glm4_moe",
    "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "hrm_text", "hunyuan_v1_moe", "hy_v3",
    "hyperclovax", "internlm3", "iquestcoder", "jais2", "jetmoe", "kolibri1", "laguna", "mellum",
    "mimo_v2_flash", "minimax_m2", "minimax_m3_vl_text", "ministral3", "nanochat",
    "olmo", "olmo3", "openai-gpt", "phimoe", "sarvam_moe", "solar_open", "vaultgemma",
)  # fmt: skip
_WITH_LATENT = (
    "axk1", "axk2", "deepseek_v2", "deepseek_v32", "dots3_note_text", "glm4_moe_lite", "glm_moe_dsa", "hy_v4",
    "minicpm3", "sarvam_mla", "youtu",
)  # fmt: skip
# Families, with what they want beside or otherwise.
OTHERS: dict[str, dict[str, Any]] = {
    **{name: {} for name in _PLAIN},
    **dict.fromkeys(_WITH_LATENT, LATENT),
    "cohere_compass_text": {
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), ROTARY)
    },
    "deepseek_v4": {"num_hidden_layers": 4, "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"]},
    "gemma4_text": {
        "enable_moe_block": True,
        "top_k_experts": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 512,
    },
    "longcat_flash": {**LATENT, "head_dim": 8},
    "qwen2_moe": {"sliding_window": None},
}


def settings(name: str) -> dict[str, Any]:
    """Return the configuration of a family of OTHERS."""
    kind = CONFIG_MAPPING[name]
    known = {*inspect.signature(kind.__init__).parameters, *kind.attribute_map}
    for base in kind.__mro__:
        known |= set(getattr(base, "__annotations__", {}))
    return {key: value for key, value in GENERAL.items() if key in known} | OTHERS[name]


# Families with a causal language model in transformers that nobody has tried here, by why.
UNTRIED: dict[str, tuple[str, ...]] = {
    "encoders, or decoders made from one": (
        "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
        "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta",
        "xlm-roberta-xl", "xlnet", "xmod",
    ),
    "halves of encoder-decoders": (
        "bart", "beam", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart",
        "moss_transcribe_diarize", "mvp", "pegasus", "plbart", "prophetnet", "trocr", "whisper",
    ),
    "models of images, sound or music, whose language models are tried where they have a `model_type` of their own": (
        "dots3_note", "emu3", "fuyu", "gemma3n", "gemma4_unified", "git", "got_ocr2", "llama4",
        "mllama", "moshi", "musicgen", "musicgen_melody", "phi4_multimodal", "qwen4_exp",
    ),
    "drafts for another model, which they cannot run without": ("gemma4_assistant", "gemma4_unified_assistant"),
    "of which only the language model was tried: one sequence at a time, as its attention has a mask of its own": (
        "glm5_next",
    ),
    "bytes in patches, with a model of its own to cut them": ("blt",),
    "a configuration in parts, of which no tiny one was made": ("dbrx",),
    "layers share their keys by a schedule that no tiny model has": ("gemma3n_text",),
    "refused when a run starts, as its logits are made by a rule that is not known here": (
        "dory", "modernbert-decoder",
    ),
    "old, and hardly trained any more": ("cpmant", "gpt-sw3", "gpt_neox_japanese"),
}  # fmt: skip
