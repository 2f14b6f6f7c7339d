"""Programs that serve an export, by what they load, and the commands for them. None of them is run here.

vLLM refuses adapters with DoRA or with modules trained whole (its lora/peft_helper.py), and of few mixtures it takes
adapters on stacked experts. llama.cpp's convert_lora_to_gguf.py ends at a tensor that is neither LoRA's A nor its B; it
and Ollama scale adapters by alpha/r, whatever adapter_config.json says of rsLoRA. Ollama converts few architectures by
itself (its convert/convert.go), and takes GGUF of all. vLLM was tried, the others' sources were read.
"""

from __future__ import annotations

import json
from typing import Final

from kubetune.config.schema import Config
from kubetune.tasks import task_module

VLLM, GGUF, OLLAMA = "vLLM", "GGUF", "Ollama"
MODEL_GGUF, ADAPTER_GGUF = "model-q8_0.gguf", "adapter.gguf"
"""Files that the commands make, in the folder of the export."""
MIXED = "--enable-mixed-moe-lora-format"
"""vLLM's switch that lets an adapter be told to have its experts in one tensor (`is_3d_lora_weight`)."""

CONVERTED_BY_OLLAMA: Final = {
    "model": {
        "LlamaForCausalLM", "MixtralForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM",
        "Phi3ForCausalLM", "Qwen2ForCausalLM", "Olmo3ForCausalLM", "CohereForCausalLM", "GptOssForCausalLM",
        "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "Lfm2ForCausalLM",
    },
    "adapter": {"LlamaForCausalLM", "MistralForCausalLM", "Gemma2ForCausalLM"},
}  # fmt: skip
"""Architectures whose weights, or whose adapters, Ollama itself makes GGUF of."""

EXPERTS_IN_VLLM: Final = {
    "deepseek_v3", "ernie4_5_moe", "glm4_moe", "gpt_oss", "granitemoe", "lfm2_moe", "olmoe", "phimoe", "qwen3_moe",
    "qwen3_next",
}  # fmt: skip
"""Kinds of mixtures (`model_type`) whose adapters on stacked experts vLLM 0.32 holds exactly as PEFT does, if it is
told that they are stacked. Mixtral's it leaves out without a word. `python -m tests.peers.vllm_adapters` tries all."""


def served_by(config: Config, kind: str, experts_of: str | None = None) -> tuple[str, ...]:
    """Names of what can serve an export (`adapter`, `merged` or `model`) of a run.

    `experts_of`: the kind of mixture whose stacked experts the adapter is on.
    """
    if config.task == "reward_model" and kind != "adapter":
        return (VLLM,)
    lora = config.lora if kind == "adapter" else None
    if not _generates(config) or (lora and (lora.use_dora or lora.modules_to_save)):
        return ()
    if experts_of:
        return (VLLM,) if experts_of in EXPERTS_IN_VLLM else ()
    return (VLLM,) if lora and lora.use_rslora else (VLLM, GGUF, OLLAMA)


def lora_module(name: str, path: str, stacked: bool) -> str:
    """A word for vLLM's `--lora-modules`: an adapter, maybe one whose experts lie in one tensor."""
    return json.dumps({"name": name, "path": path, "is_3d_lora_weight": True}) if stacked else f"{name}={path}"


def commands(config: Config, kind: str, base: str, experts_of: str | None = None) -> list[str]:
    """A card's part on serving: commands as a person would type them in the export's folder, and what loads it not."""
    able = served_by(config, kind, experts_of)
    lora = config.lora if kind == "adapter" else None
    if not able and not _generates(config):
        return []
    if config.task == "reward_model":
        lines = ["$ vllm serve . --runner pooling --pooler-config '{\"use_activation\": false}'    # asked at /pooling"]
    elif lora:
        told = f"{MIXED} --lora-modules '{lora_module('tuned', '.', True)}'" if experts_of else "--lora-modules tuned=."
        lines = [
            f"$ vllm serve {base} --enable-lora --max-lora-rank {lora.r} {told}",
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
    if lora and experts_of and not (lora.use_dora or lora.modules_to_save):
        who = "llama.cpp and Ollama load no" if able else "None of vLLM, llama.cpp and Ollama is known to load"
        shown.append(f"{who} adapters on the experts of {experts_of}. `kubetune export --merge` makes what all load.")
    elif lora and (lora.use_dora or lora.modules_to_save):
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
