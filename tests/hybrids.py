"""Tiny configurations of models that are recurrent, in part or as a whole."""

from __future__ import annotations

from typing import Any

from tests.architectures import COMMON, SMALL_EXPERTS

WITHOUT_HEADS = {
    k: v
    for k, v in COMMON.items()
    if k not in ("num_attention_heads", "num_key_value_heads", "head_dim")
}
DELTA = {
    **COMMON,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_hidden_layers": 4,
}
DELTA_EXPERTS = {
    **DELTA,
    **SMALL_EXPERTS,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}
SSM = {
    **COMMON,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
MAMBA = {**WITHOUT_HEADS, "state_size": 8, "num_hidden_layers": 2}
MAMBA2 = {**MAMBA, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 64}
KIMI = {
    **COMMON,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "moe_intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_hidden_layers": 4,
    "num_expert_group": 1,
    "topk_group": 1,
}
CONV = {**COMMON, "layer_types": ["conv", "full_attention", "conv"]}
INKLING = {
    **COMMON,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 9,
    "rel_extent": 32,
    "d_rel": 4,
    "moe_intermediate_size": 48,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
    "unpadded_vocab_size": 320,
}
# Recurrent models that run on packed batches.
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": DELTA_EXPERTS,
    "lara_mini": {
        **DELTA_EXPERTS,
        "layer_types": [*["linear_attention"] * 2, "sliding_attention", "full_attention"],
    },
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA_EXPERTS,
    "olmo_hybrid": {**DELTA, "linear_num_value_heads": 4, "linear_num_key_heads": 4},
    "kimi_linear": {
        **KIMI,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "mlp_layer_types": ["dense", *["sparse"] * 3],
    },
    "bailing_hybrid": {**KIMI, "layer_group_size": 4},
    "bamba": {**SSM, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **SSM,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 4,
        "shared_intermediate_size": 48,
    },
    "nemotron_h": {
        **COMMON,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "ssm_state_size": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 48,
        "num_hidden_layers": 4,
    },
    "falcon_h1": {
        **COMMON,
        "lm_head_multiplier": 0.5,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
    },
    "jamba": {
        **COMMON,
        "num_experts": 2,
        "mamba_d_state": 8,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
    },
    "zamba": {
        **COMMON,
        "num_key_value_heads": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
    },
    "zamba2": {
        **COMMON,
        "num_key_value_heads": 4,
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "chunk_size": 16,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
    },
    "lfm2": {**CONV, "num_key_value_heads": 2},
    "lfm2_moe": {**CONV, **SMALL_EXPERTS, "moe_intermediate_size": 48, "num_dense_layers": 1},
    "lfm3": {
        **CONV,
        "layer_types": ["conv", "full_attention", "sliding_attention"],
        "sliding_window": 9,
    },
    "minimax": {
        **COMMON,
        "num_local_experts": 4,
        "block_size": 16,
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
    },
    "recurrent_gemma": {**COMMON, "attention_window_size": 9},
    "zaya": {**COMMON, "num_experts": 4, "moe_intermediate_size": 48, "router_hidden_size": 16},
    "mamba": MAMBA,
    "falcon_mamba": {**MAMBA, "time_step_rank": 8},
    "mamba2": MAMBA2,
    "rwkv": {
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "xlstm": {
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "chunk_size": 16,
        "autocast_kernel_dtype": "float32",
    },
}

# Recurrent models whose attention is of a kind of its own, so that each sequence is run alone.
BIASED: dict[str, dict[str, Any]] = {
    "qwen4_exp_text": {
        **DELTA_EXPERTS,
        "hc_count": 2,
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "inkling_text": {
        **INKLING,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "n_shared_experts": 1,
    },
    "inkling2_text": {**INKLING, "n_layers_per_attn_res_block": 2},
    "inkling2_loop_text": {
        **INKLING,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
        "loop_num_passes": 2,
        "loop_gate_rank": 4,
    },
}
