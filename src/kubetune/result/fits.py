"""Checks of what can be done with a run's result: the forms to write it in, and the data to evaluate it on.

Only settings and names of files are read. The verbs ask here before they load a model, and the page, which has no
torch, shows the same refusals.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kubetune import errors, extras
from kubetune.config.schema import DataConfig, LoraConfig, ModelConfig
from kubetune.result.gguf_files import quantise

# The file of an export that says what it was made from, and what was proved.
PROVENANCE: Final = "provenance.json"

# What `--gguf` takes.
GGUF_ADAPTER: Final = "adapter"
GGUF_TYPES: Final = (
    "bf16", "f16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0",
    "q6_k", "q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s", "q3_k_l", "q3_k_m", "q3_k_s", "q2_k",
    "iq4_xs", "iq4_nl", "iq3_m", "iq3_s", GGUF_ADAPTER,
)  # fmt: skip

# What `--quantize` takes.
QUANTIZED: Final = ("fp8",)


def require_adapter(lora: LoraConfig | None, run_dir: Path) -> None:
    """Raise ConfigError for a merge where there is no adapter."""
    if lora is None:
        raise errors.ConfigError(
            f"{run_dir} trained every weight, so there is no adapter to merge: leave --merge out"
        )


def require_gguf(
    kind: str,
    lora: LoraConfig | None,
    model: ModelConfig,
    task: str,
    *,
    answers_text: bool,
) -> None:
    """Raise an error if no GGUF file can be written of a result. `answers_text`: its model answers text with text."""
    extras.require(f"--gguf {kind}", "gguf")
    if not answers_text:
        raise errors.ModelError(
            f"{task} is not written as GGUF, only models that answer text with text. Nothing was written."
        )
    if model.trust_remote_code:
        raise errors.ModelError(
            "a model with code of its own is not written as GGUF, since llama.cpp has code for each family. Nothing "
            "was written."
        )
    quantise.require(kind)
    if kind == GGUF_ADAPTER:
        require_gguf_adapter(lora)


def require_gguf_adapter(lora: LoraConfig | None) -> None:
    """Raise ModelError for a run whose adapter llama.cpp does not load."""
    reason = None
    if lora is None:
        reason = "the run trained every weight, so there is no adapter"
    elif lora.use_dora:
        reason = "llama.cpp loads no adapters with weights of DoRA"
    elif lora.modules_to_save:
        reason = f"llama.cpp loads no adapters with modules trained whole ({', '.join(lora.modules_to_save)})"
    if reason is not None:
        raise errors.ModelError(
            f"{reason}; `--gguf bf16` writes the whole model. Nothing was written."
        )


def require_quantized(form: str, model: ModelConfig, task: str, *, answers_text: bool) -> None:
    """Raise an error if the weights of a result cannot be quantised in this form."""
    if form not in QUANTIZED:
        raise errors.ConfigError(
            f"--quantize is {form!r}; expected {' or '.join(QUANTIZED)}. Nothing was written."
        )
    extras.require("--quantize fp8", "compressed_tensors")
    if not answers_text:
        raise errors.ModelError(
            f"{task} is not quantised to FP8, only models that answer text with text. Nothing was written."
        )
    if model.trust_remote_code:
        raise errors.ModelError(
            "a model with code of its own is not quantised to FP8. Nothing was written."
        )


def require_evaluation_data(data: DataConfig, run_dir: Path) -> None:
    """Raise ConfigError for a run without evaluation data."""
    if not data.eval:
        raise errors.ConfigError(f"{run_dir} has no evaluation data; give some with --data")


def require_benchmarks(run_dir: Path, task: str, *, answers_text: bool) -> None:
    """Raise ConfigError for a result that benchmarks cannot ask, or where they are not installed."""
    if not answers_text:
        raise errors.ConfigError(
            f"benchmarks are for models of text; {run_dir} is a run of task {task}"
        )
    extras.require("evaluation.benchmarks", "lm_eval")


def place_of(run_dir: Path, checkpoint: str, form: str) -> Path:
    """Return the default folder of an export. `form`: its kind, or `gguf-q8_0`, or `fp8`."""
    return run_dir / "exports" / f"{checkpoint}-{form}"


def require_place(out: Path) -> None:
    """Raise ConfigError if `out` holds anything but an earlier export, which a new one replaces."""
    if out.exists() and not out.is_dir():
        raise errors.ConfigError(
            f"{out} is a file; choose a folder with --output. Nothing was written."
        )
    if out.is_dir() and any(out.iterdir()) and not (out / PROVENANCE).is_file():
        raise errors.ConfigError(
            f"{out} holds other files; choose another folder with --output. Nothing was written."
        )
