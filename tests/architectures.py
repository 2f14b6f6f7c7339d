"""Tiny configurations of many Hugging Face architectures, and what plain transformers makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from kubetune.config.schema import LoraConfig
from kubetune.models.adapters.lora import add_lora
from tests.tiny import train_tokenizer

COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
UNGROUPED = {k: v for k, v in COMMON.items() if k not in ("num_key_value_heads", "head_dim")}
SLIDING = {**COMMON, "sliding_window": 9}
GPT = {"vocab_size": 320, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}
GPT_TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
MIXTURE = {**COMMON, "num_local_experts": 4}
SMALL_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}

# Architectures that run padding-free and are checked in every test run.
PROMISED: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "qwen2": COMMON,
    "qwen3": COMMON,
    "mistral": SLIDING,
    "gemma": COMMON,
    "gemma2": {**SLIDING, "query_pre_attn_scalar": 16},
    "gpt2": {**GPT, **GPT_TOKENS},
    "phi": COMMON,
    "phi3": SLIDING,
}

# More architectures that run padding-free.
PADDING_FREE: dict[str, dict[str, Any]] = {
    "qwen2+window": {**SLIDING, "use_sliding_window": True, "max_window_layers": 1},
    "gemma3_text": {**SLIDING, "query_pre_attn_scalar": 16},
    "gpt_neox": UNGROUPED,
    "smollm3": COMMON,
    "olmo2": COMMON,
    "cohere": {**COMMON, "logit_scale": 0.25},
    "cohere2": SLIDING,
    "granite": {
        **COMMON,
        "logits_scaling": 4.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 2.0,
    },
    "starcoder2": SLIDING,
    "stablelm": COMMON,
    "glm4": COMMON,
    "exaone4": SLIDING,
    "ministral": COMMON,
    "helium": COMMON,
    "seed_oss": COMMON,
    "ernie4_5": COMMON,
    "nemotron": COMMON,
    "persimmon": UNGROUPED,
    "hunyuan_v1_dense": COMMON,
    "diffllama": COMMON,
    "opt": {
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "ffn_dim": 96,
        "max_position_embeddings": 512,
        "word_embed_proj_dim": 64,
        "pad_token_id": 0,
    },
    "gpt_bigcode": GPT,
    "qwen3_moe": {**COMMON, **SMALL_EXPERTS, "moe_intermediate_size": 48},
    "mixtral": MIXTURE,
    "olmoe": {**COMMON, **SMALL_EXPERTS},
    "gpt_oss": {**MIXTURE, "sliding_window": 9, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **UNGROUPED,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
    },
}

# Architectures whose sequences would see each other, or that refuse: each sequence is run alone.
ONE_BY_ONE: dict[str, dict[str, Any]] = {
    "gptj": {**GPT, "rotary_dim": 8},
    "gpt_neo": {
        "vocab_size": 320,
        "hidden_size": 64,
        "num_layers": 2,
        "attention_types": [[["global", "local"], 1]],
        "num_heads": 4,
        "window_size": 9,
        "max_position_embeddings": 512,
    },
    "codegen": {**GPT, "rotary_dim": 8},
    "bloom": {"vocab_size": 320, "hidden_size": 64, "n_layer": 3, "n_head": 4},
    "falcon": {
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    },
    "mpt": {"vocab_size": 320, "d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 512},
    "xglm": {
        "vocab_size": 320,
        "d_model": 64,
        "num_layers": 2,
        "attention_heads": 4,
        "ffn_dim": 96,
    },
    "llama4_text": {
        **COMMON,
        "attention_chunk_size": 9,
        "num_local_experts": 2,
        "intermediate_size_mlp": 96,
    },
    "doge": COMMON,
}

LORA_TARGETS = {
    "llama4_text": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "mamba": ["in_proj"],
    "falcon_mamba": ["in_proj"],
    "mamba2": ["in_proj"],
    "falcon_h1": ["q_proj", "v_proj"],
    "nemotron_h": ["in_proj", "q_proj", "v_proj", "up_proj"],
}
NO_DROPOUT = (
    "attention_dropout", "hidden_dropout", "residual_dropout", "embedding_dropout", "activation_dropout", "dropout",
    "attn_pdrop", "resid_pdrop", "embd_pdrop", "resid_dropout", "embed_dropout",
)  # fmt: skip


def build_model(
    name: str, settings: dict[str, Any], *, lora: bool = True, dtype: torch.dtype = torch.float32
) -> Any:
    """Return a random model of an architecture, its attention sharpened so that leaks and masks matter."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name.partition("+")[0], **settings)
    for attribute in NO_DROPOUT:
        if getattr(config, attribute, None):
            setattr(config, attribute, 0.0)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=dtype
    ).train()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            is_vector = parameter.dim() == 1 and "norm" in parameter_name.lower()
            if is_vector or "sinks" in parameter_name or parameter_name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif parameter.dim() > 1:
                parameter.mul_(2.5)
    if lora:
        settings = LoraConfig(r=4, alpha=8, target_modules=LORA_TARGETS.get(name, "all-linear"))
        model = add_lora(model, settings, task_type="CAUSAL_LM", seed=0)
        randomize_lora(model)
    return model


def randomize_lora(model: nn.Module) -> None:
    """Draw random adapters: LoRA's B starts at zero, which would hide A's gradient."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)


def random_rows(
    lengths: Sequence[int] = (37, 5, 300, 21, 64), seed: int = 0
) -> list[tuple[Any, Any]]:
    """Return (ids, trained) of sequences whose first part is an untrained prompt."""
    generator = np.random.default_rng(seed)
    rows = []
    for length in lengths:
        ids = generator.integers(5, 300, length).astype(np.uint32)
        rows.append((ids, np.arange(length) >= generator.integers(1, length // 2 + 1)))
    return rows


def reference_gradients(
    model: Any, rows: Sequence[tuple[Any, Any]]
) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and gradients of plain transformers: eager attention, full logits, one sequence at a time."""
    lm = model.get_base_model() if hasattr(model, "get_base_model") else model
    lm.set_attn_implementation("eager")
    labels = sum(int(trained[1:].sum()) for _, trained in rows)
    total = 0.0
    for ids, trained in rows:
        tokens = torch.from_numpy(ids.astype(np.int64))
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
        target = torch.where(torch.from_numpy(trained), tokens, -100)[1:]
        loss = (
            nn.functional.cross_entropy(logits, target, ignore_index=-100, reduction="sum") / labels
        )
        loss.backward()
        total += loss.item()
    return total, take_gradients(model)


def take_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all gradients, which are then zeroed."""
    gradients = {
        n: p.grad.clone()
        for n, p in model.named_parameters()
        if p.requires_grad and p.grad is not None
    }
    model.zero_grad(set_to_none=False)
    return gradients


def relative_error(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the norm of the difference of all gradients over their norm."""
    assert ours.keys() >= theirs.keys()
    difference = sum(float((ours[n] - g).norm() ** 2) for n, g in theirs.items())
    return float((difference / sum(float(g.norm() ** 2) for g in theirs.values())) ** 0.5)


def save_model(folder: Path, name: str = "llama", **settings: Any) -> Path:
    """Save a random two-layer model with a locally trained tokenizer in Hugging Face form, and return the folder."""
    train_tokenizer(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        name,
        **{
            **(PROMISED | PADDING_FREE | ONE_BY_ONE)[name],
            "num_hidden_layers": 2,
            "vocab_size": 512,
            **settings,
        },
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
