"""Cases of `kubetune bench`: sizes of models and settings of runs. Data only; another case is an entry here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


def _shape(
    hidden: int,
    layers: int,
    intermediate: int,
    heads: int,
    key_heads: int,
    head_size: int,
    **more: Any,
) -> dict[str, Any]:
    """Return a config.json with these sizes; `more` replaces keys of it."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head_size,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 1,
        **more,
    }


# config.json of each size: Qwen3's sizes, in the layers of a Llama.
#     hidden size, layers, MLP size, heads, heads of keys and values, size of a head
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _shape(64, 2, 128, 4, 2, 16, vocab_size=2_000),
    "42M": _shape(512, 8, 1536, 8, 4, 64, vocab_size=32_000),
    "0.6B": _shape(1024, 28, 3072, 16, 8, 128),
    "4B": _shape(2560, 36, 9728, 32, 8, 128),
    "8B": _shape(4096, 36, 12_288, 32, 8, 128, tie_word_embeddings=False),
}

# Parts of which cases put their settings together.
LORA: dict[str, Any] = {
    "lora.r": 16,
    "lora.target_modules": "all-linear",
    "model.dtype": "bfloat16",
}
FULL: dict[str, Any] = {"training.learning_rate": 1e-5, "model.dtype": "bfloat16"}
ALONE: dict[str, Any] = {"model.attention": "sdpa"}
PLAIN: dict[str, Any] = {"training.compile": False}
COMPILED: dict[str, Any] = {"training.compile": True}
LAYERS: dict[str, Any] = {"training.compile": "layers"}
# Names of cases with a base in parts.
PARTS = "LoRA, bfloat16, base in parts"
PARTS_LATE = f"{PARTS}, none gathered ahead"
# As models/sharded_base has it, which imports torch.
GATHER_LATE = "KUBETUNE_GATHER_LATE"
FP8: dict[str, Any] = {"training.fp8": True}


@dataclass(frozen=True)
class Case:
    """A size of model, and settings of a run on it."""

    shape: str  # key of SHAPES
    what: str  # the settings, in words
    settings: Mapping[str, Any]  # by dotted key
    ranks: int = 1
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return its name in results."""
        return f"{self.shape} {self.what}"


def in_parts(shape: str, ranks: int) -> list[Case]:
    """Return the cases of a base that is cut over some ranks: the next layer gathered ahead, and only when it is used."""
    settings = LORA | PLAIN | {"training.parallelism": "shard_base"}
    return [
        Case(shape, PARTS, settings, ranks),
        Case(shape, PARTS_LATE, settings, ranks, {GATHER_LATE: "1"}),
    ]


def on_cpu(shape: str = "42M") -> list[Case]:
    """Return the cases for two minutes on two cores."""
    return [
        Case(shape, "LoRA, bfloat16", LORA | PLAIN),
        Case(shape, "LoRA, bfloat16, compiled", LORA | COMPILED),
        Case(shape, "LoRA, bfloat16, one sequence at a time", LORA | PLAIN | ALONE),
        Case(shape, "full, bfloat16", FULL | PLAIN),
        *in_parts(shape, ranks=2),
    ]


def on_gpu(gpus: int = 1) -> list[Case]:
    """Return the cases for ten minutes; those by which settings are chosen come first, after what takes several GPUs."""
    cases = in_parts("8B", gpus) if gpus > 1 else []
    for shape in ("4B", "8B", "0.6B"):
        cases += [
            Case(shape, "LoRA, bfloat16, compiled", LORA | COMPILED),
            Case(shape, "LoRA, bfloat16", LORA | PLAIN),
            Case(shape, "LoRA, bfloat16, compiled layers", LORA | LAYERS),
            Case(shape, "LoRA, bfloat16, compiled, fp8", LORA | COMPILED | FP8),
            Case(shape, "LoRA, bfloat16, one sequence at a time", LORA | PLAIN | ALONE),
            Case(shape, "full, bfloat16, compiled", FULL | COMPILED),
        ]
    return cases
