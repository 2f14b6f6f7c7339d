"""Programs that serve an export, by what their sources load, and the commands for them. None of them is run here.

vLLM refuses adapters with DoRA or with modules trained whole (its lora/peft_helper.py). llama.cpp's
convert_lora_to_gguf.py ends at a tensor that is neither LoRA's A nor its B; it and Ollama scale adapters by alpha/r,
whatever adapter_config.json says of rsLoRA. Ollama converts few architectures by itself (its convert/convert.go), and
takes GGUF of all.
"""

from __future__ import annotations

from typing import Final

from kubetune.config.schema import Config
from kubetune.tasks import task_module

VLLM, GGUF, OLLAMA = "vLLM", "GGUF", "Ollama"
MODEL_GGUF, ADAPTER_GGUF = "model-q8_0.gguf", "adapter.gguf"
"""Files that the commands make, in the folder of the export."""

CONVERTED_BY_OLLAMA: Final = {
    "model": {
        "LlamaForCausalLM", "MixtralForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM",
        "Phi3ForCausalLM", "Qwen2ForCausalLM", "Olmo3ForCausalLM", "CohereForCausalLM", "GptOssForCausalLM",
        "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "Lfm2ForCausalLM",
    },
    "adapter": {"LlamaForCausalLM", "MistralForCausalLM", "Gemma2ForCausalLM"},
}  # fmt: skip
"""Architectures whose weights, or whose adapters, Ollama itself makes GGUF of."""


def served_by(config: Config, kind: str) -> tuple[str, ...]:
    """Names of what can serve an export (`adapter`, `merged` or `model`) of a run."""
    if config.task == "reward_model" and kind != "adapter":
        return (VLLM,)
    lora = config.lora if kind == "adapter" else None
    if not _generates(config) or (lora and (lora.use_dora or lora.modules_to_save)):
        return ()
    return (VLLM,) if lora and lora.use_rslora else (VLLM, GGUF, OLLAMA)


def commands(config: Config, kind: str, base: str) -> list[str]:
    """A card's part on serving: commands as a person would type them in the export's folder, and what loads it not."""
    able = served_by(config, kind)
    lora = config.lora if kind == "adapter" else None
    if not able and not _generates(config):
        return []
    if config.task == "reward_model":
        lines = ["$ vllm serve . --runner pooling --pooler-config '{\"use_activation\": false}'    # asked at /pooling"]
    elif lora:
        lines = [
            f"$ vllm serve {base} --enable-lora --max-lora-rank {lora.r} --lora-modules tuned=.",
            f"$ python llama.cpp/convert_lora_to_gguf.py . --base {base} --outfile {ADAPTER_GGUF}",
            "$ ollama create tuned -f Modelfile    # the base in its FROM line is to be one that Ollama has",
        ]
    else:
        lines = [
            "$ vllm serve .",
            f"$ python llama.cpp/convert_hf_to_gguf.py . --outfile {MODEL_GGUF} --outtype q8_0",
            "$ ollama create tuned -f Modelfile",
        ]
    shown = ["\n".join(["```console", *lines[: len(able)], "```"])] if able else []
    if lora and (lora.use_dora or lora.modules_to_save):
        what = "weights of DoRA" if lora.use_dora else "modules trained whole"
        shown.append(
            f"None of vLLM, llama.cpp and Ollama loads adapters with {what}. "
            "`kubetune export --merge` makes what all of them load."
        )
    elif lora and lora.use_rslora:
        shown.append(
            "llama.cpp and Ollama would scale this adapter otherwise than it was trained: they know no rsLoRA. "
            "`kubetune export --merge` makes what they run."
        )
    return ["\n\n".join(["## How to serve", *shown])] if shown else []


def _generates(config: Config) -> bool:
    """The run's model answers text with text."""
    return bool(task_module(config).AUTO_CLASS == "AutoModelForCausalLM")
