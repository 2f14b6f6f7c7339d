"""Cases of `kubetune bench`: sizes of models and settings of runs. Data only; another case is an entry here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


def _shape(
    hidden: int, layers: int, intermediate: int, heads: int, keys: int, size: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "head_dim": size,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 1,
        **more,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _shape(64, 2, 128, 4, 2, 16, vocab_size=2_000),
    "42M": _shape(512, 8, 1536, 8, 4, 64, vocab_size=32_000),
    "0.6B": _shape(1024, 28, 3072, 16, 8, 128),
    "4B": _shape(2560, 36, 9728, 32, 8, 128),
    "8B": _shape(4096, 36, 12_288, 32, 8, 128, tie_word_embeddings=False),
}
"""config.json of each size: Qwen3's sizes, in the layers of a Llama."""

LORA: dict[str, Any] = {"lora.r": 16, "lora.target_modules": "all-linear"}
FULL: dict[str, Any] = {"training.learning_rate": 1e-5}
FP32, BF16 = {"model.dtype": "float32"}, {"model.dtype": "bfloat16"}
UNSHARED = {"data.share_prefixes": False}
PLAIN, COMPILED, LAYERS = ({"training.compile": how} for how in (False, True, "layers"))


@dataclass(frozen=True)
class Case:
    """A size, and settings of a run on it by dotted key. `shared`: tokens with which all rows begin alike.

    `trainer`: what trains.
    """

    shape: str
    what: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    shared: int = 0
    trainer: str = "kubetune"

    @property
    def name(self) -> str:
        """Its name in results."""
        return f"{self.shape} {self.what}"


def on_cpu(shape: str = "42M") -> list[Case]:
    """Two minutes on two cores."""
    return [
        Case(shape, "LoRA, float32", LORA | FP32 | PLAIN),
        Case(shape, "LoRA, bfloat16", LORA | BF16 | PLAIN),
        Case(shape, "LoRA, bfloat16, compiled", LORA | BF16 | COMPILED),
        Case(
            shape,
            "LoRA, bfloat16, one sequence at a time",
            LORA | BF16 | PLAIN | {"model.attention": "sdpa"},
        ),
        Case(shape, "full, bfloat16", FULL | BF16 | PLAIN),
        Case(shape, "LoRA, bfloat16, beginnings for each row", LORA | BF16 | PLAIN | UNSHARED, 600),
        Case(shape, "LoRA, bfloat16, beginnings once", LORA | BF16 | PLAIN, 600),
        Case(shape, "LoRA, bfloat16, TRL", trainer="trl"),
    ]


def on_gpu() -> list[Case]:
    """Ten minutes; what decides comes first."""
    fp8, qlora = {"training.fp8": True}, {"quantization": "4bit"}
    cases = []
    for shape in ("4B", "8B", "0.6B"):
        cases += [
            Case(shape, "LoRA, bfloat16, compiled", LORA | BF16 | COMPILED),
            Case(shape, "LoRA, bfloat16", LORA | BF16 | PLAIN),
            Case(shape, "LoRA, bfloat16, compiled layers", LORA | BF16 | LAYERS),
            Case(shape, "LoRA, bfloat16, compiled, fp8", LORA | BF16 | COMPILED | fp8),
            Case(shape, "QLoRA, bfloat16, compiled", LORA | BF16 | COMPILED | qlora),
        ]
        if shape == "4B":
            alone = {"model.attention": "sdpa"}
            cases += [
                Case(shape, "LoRA, bfloat16, one sequence at a time", LORA | BF16 | PLAIN | alone),
                Case(
                    shape,
                    "LoRA, bfloat16, beginnings for each row",
                    LORA | BF16 | COMPILED | UNSHARED,
                    600,
                ),
                Case(shape, "LoRA, bfloat16, beginnings once", LORA | BF16 | COMPILED, 600),
            ]
        else:
            cases.append(Case(shape, "full, bfloat16, compiled", FULL | BF16 | COMPILED))
        cases.append(Case(shape, "LoRA, bfloat16, TRL", trainer="trl"))
    return cases
