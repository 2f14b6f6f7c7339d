"""Programs that serve an export, by what they load, and the commands for them. None of them is run here.

vLLM refuses adapters with DoRA or with modules trained whole (its lora/peft_helper.py), and of few mixtures it takes
adapters on stacked experts. llama.cpp's convert_lora_to_gguf.py ends at a tensor that is neither LoRA's A nor its B; it
and Ollama scale adapters by alpha/r, whatever adapter_config.json says of rsLoRA. Ollama converts few architectures by
itself (its convert/convert.go), and takes GGUF of all. vLLM was tried, and llama.cpp; Ollama's sources were read.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kubetune.config.schema import LoraConfig
from kubetune.config.vllm import LORA_RANKS, lora_rank
from kubetune.tasks import task_of

VLLM = "vLLM"
GGUF = "GGUF"
OLLAMA = "Ollama"

# Files that the commands make, in the folder of the export.
MODEL_GGUF = "model-q8_0.gguf"
ADAPTER_GGUF = "adapter.gguf"

# Architectures whose weights Ollama itself makes GGUF of. It takes adapters only as GGUF: since 0.12.11 its parser looks
# for no other file of weights in a folder than `model*.safetensors`, and PEFT's is called `adapter_model.safetensors`.
CONVERTED_BY_OLLAMA: Final = {
    "LlamaForCausalLM", "MixtralForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM",
    "Phi3ForCausalLM", "Qwen2ForCausalLM", "Olmo3ForCausalLM", "CohereForCausalLM", "GptOssForCausalLM",
    "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "Lfm2ForCausalLM",
}  # fmt: skip

# Kinds of mixtures (`model_type`) whose adapters on stacked experts vLLM 0.32 holds exactly as PEFT does, if it is
# given a flag for it. Mixtral's it leaves out, and prints nothing. `python -m tests.peers.vllm_adapters` tries all.
EXPERTS_IN_VLLM: Final = {
    "deepseek_v3", "ernie4_5_moe", "glm4_moe", "gpt_oss", "granitemoe", "lfm2_moe", "olmoe", "phimoe", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_moe", "qwen3_next",
}  # fmt: skip

# Kinds of models that see, of which transformers trains the text model alone: what its `model.` is called in the whole
# one, which vLLM loads. It takes an adapter with other names, leaves it out, and prints nothing.
NAMES_IN_VLLM: Final = {"qwen3_5": "model.language_model.", "qwen3_5_moe": "model.language_model."}

# Folder of an export with such an adapter under vLLM's names.
FOR_VLLM = "vllm"


def served_by(
    task: str,
    lora: LoraConfig | None,
    kind: str,
    base: Mapping[str, Any],
) -> tuple[str, ...]:
    """Return the names of what can serve an export (`adapter`, `merged` or `model`) of a run.

    `task`: `Config.task_name`. `lora`: as trained.

    `base`, as provenance.json has it: `experts_of`, the kind of mixture whose stacked experts an adapter is on;
    `text_of`, the kind of model that sees whose text model it is on.
    """
    if task == "reward_model" and kind != "adapter":
        return (VLLM,)
    if kind != "adapter":
        lora = None
    if not _generates(task):
        return ()
    # What none of the three loads as an adapter.
    if lora is not None and (lora.use_dora or lora.modules_to_save):
        return ()

    # Then what single programs cannot do.
    able = {VLLM, GGUF, OLLAMA}
    if lora and (lora.use_rslora or base.get("experts_of")):
        able = {VLLM}
    if lora and not (is_known_to_vllm(base) and lora.r <= LORA_RANKS[-1]):
        able.discard(VLLM)
    return tuple(name for name in (VLLM, GGUF, OLLAMA) if name in able)


def is_known_to_vllm(base: Mapping[str, Any]) -> bool:
    """True if vLLM was seen to load all of an adapter on such a base."""
    experts_of = base.get("experts_of")
    text_of = base.get("text_of")
    if experts_of and experts_of not in EXPERTS_IN_VLLM:
        return False
    return not text_of or text_of in NAMES_IN_VLLM


def lora_words(adapters: Iterable[tuple[str, str, Mapping[str, Any]]]) -> list[str]:
    """Return the words of vLLM's command line for adapters, each by its name, its path, and its base as in `served_by`."""
    modules = []
    switches = []
    for name, path, base in adapters:
        if base.get("text_of"):
            path = f"{path}/{FOR_VLLM}"
        if base.get("experts_of"):  # in one tensor, which vLLM takes only with a flag
            switches = ["--enable-mixed-moe-lora-format"]
            modules.append(json.dumps({"name": name, "path": path, "is_3d_lora_weight": True}))
        else:
            modules.append(f"{name}={path}")

    return [*switches, "--lora-modules", *modules]


def commands(
    task: str,
    lora: LoraConfig | None,
    kind: str,
    name: str,
    base: Mapping[str, Any],
) -> list[str]:
    """Return a card's part on serving: commands as typed in the export's folder, and which programs cannot load it.

    `name`: what the base is called; the others as in `served_by`.
    """
    able = served_by(task, lora, kind, base)
    if kind != "adapter":
        lora = None
    if not able and not _generates(task):
        return []
    if task == "reward_model":
        lines = {
            VLLM: "vllm serve . --runner pooling --pooler-config '{\"use_activation\": false}'    # asked at /pooling"
        }
    elif lora:
        words = shlex.join(lora_words([("tuned", ".", base)]))
        rank = lora_rank(min(lora.r, LORA_RANKS[-1]))
        lines = {
            VLLM: f"vllm serve {name} --enable-lora --max-lora-rank {rank} {words}",
            GGUF: f"python llama.cpp/convert_lora_to_gguf.py . --base {name} --outfile {ADAPTER_GGUF}",
            OLLAMA: "ollama create tuned -f Modelfile    # the file says what its line FROM wants",
        }
    else:
        lines = {
            VLLM: "vllm serve .",
            GGUF: f"python llama.cpp/convert_hf_to_gguf.py . --outfile {MODEL_GGUF} --outtype q8_0",
            OLLAMA: "ollama create tuned -f Modelfile",
        }

    parts = []
    if able:
        typed = [f"$ {lines[program]}" for program in able]
        parts.append("\n".join(["```console", *typed, "```"]))
    if lora:
        reasons = _reasons(lora, base)
        if reasons:
            parts.append(
                " ".join([*reasons, "`kubetune export --merge` makes what all of them run."])
            )

    if not parts:
        return []
    return ["\n\n".join(["## How to serve", *parts])]


def _reasons(lora: LoraConfig, base: Mapping[str, Any]) -> list[str]:
    """Return why some of the three do not serve an adapter, in sentences."""
    if lora.use_dora or lora.modules_to_save:
        what = "weights of DoRA" if lora.use_dora else "modules trained whole"
        return [f"None of vLLM, llama.cpp and Ollama loads adapters with {what}."]
    reasons = []
    if lora.use_rslora:
        reasons.append(
            "llama.cpp and Ollama would scale this adapter otherwise than it was trained: they know no rsLoRA."
        )

    experts_of = base.get("experts_of")
    if experts_of:
        reasons.append(f"llama.cpp and Ollama load no adapters on the experts of {experts_of}.")
    if lora.r > LORA_RANKS[-1]:
        reasons.append(f"vLLM loads adapters of a rank of at most {LORA_RANKS[-1]}.")
    if not is_known_to_vllm(base):
        kind = experts_of or base["text_of"]
        reasons.append(
            f"vLLM is not known to load adapters on {kind}, and leaves some out without a word."
        )

    return reasons


def _generates(task: str) -> bool:
    """True if models of a task answer text with text."""
    return bool(task_of(task).auto_class == "AutoModelForCausalLM")
