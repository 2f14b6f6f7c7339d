"""Checks of what can be done with a run's result: the forms to write it in, and the data to evaluate it on.

Only settings and names of files are read. The verbs ask here before they load a model, and the page, which has no
torch, shows the same refusals.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kubetune import errors, extras
from kubetune.base.humanize import nearest
from kubetune.config.load import load_config, read_config
from kubetune.config.schema import Config, DataConfig, LoraConfig, ModelConfig, SourceConfig
from kubetune.config.schema.model import DTYPE_NAMES
from kubetune.data.reading.hub import is_local, require_model
from kubetune.data.reading.sources import require_sources
from kubetune.result.gguf_files import quantise
from kubetune.rundir import checkpoints

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


def require_result(run_dir: Path, which: str = "best", model: str | None = None) -> Config:
    """Return the config of a run that has this checkpoint, and whose base is to be had.

    `model`: the base as `--model` names it. Raise ConfigError for no run or no checkpoint, ModelError for an adapter
    whose base is neither here nor on a hub that can be reached.
    """
    config = read_config(run_dir)
    checkpoints.choose(run_dir, which)
    # A model that was trained whole needs nothing but its checkpoint.
    if config.lora is None:
        return config
    base = config.model
    if model is not None:
        base = base.model_copy(update={"path": model, "revision": None})
    if not is_here(base):
        raise not_here(run_dir, base.path)
    if not is_local(base.path):
        require_model(base.model_copy(update={"tokenizer": None}), os.environ)
    return config


def is_here(model: ModelConfig) -> bool:
    """True if the model can be looked for: on the hub, or in a folder that exists."""
    return not is_local(model.path) or Path(model.path).expanduser().is_dir()


def not_here(run_dir: Path, path: str) -> errors.ModelError:
    """Return the error for a base that this machine lacks."""
    return errors.ModelError(
        f"{run_dir} was made from the model {path}, a folder that is not on this machine; say where the model lies "
        "here, or its name on the hub: --model PATH|ID. Nothing was written."
    )


@dataclass(frozen=True)
class WantedExport:
    """What an export is asked to be."""

    merged: bool = False
    dtype: str | None = None
    gguf: str | None = None
    quantize: str | None = None
    out: Path | None = None


def require_export(config: Config, run_dir: Path, wanted: WantedExport) -> None:
    """Raise an error for an export that makes no sense, as far as settings and files tell."""
    if wanted.merged:
        require_adapter(config.lora, run_dir)
    if wanted.gguf is not None:
        require_gguf_type(wanted.gguf)
        require_gguf(
            wanted.gguf,
            config.lora,
            config.model,
            config.task_name,
            answers_text=config.answers_text,
        )
    if wanted.quantize is not None:
        require_quantized(
            wanted.quantize, config.model, config.task_name, answers_text=config.answers_text
        )
    if wanted.dtype is not None:
        require_dtype(wanted.dtype)
    if wanted.out is not None:
        require_place(wanted.out)


def require_dtype(name: str) -> None:
    """Raise ConfigError for a dtype that weights are not written in."""
    known = sorted(set(DTYPE_NAMES.values()))
    if DTYPE_NAMES.get(name, name) not in known:
        raise errors.ConfigError(
            f"--dtype is {name}; expected one of {', '.join(known)}. Nothing was written."
        )


def require_gguf_type(kind: str) -> None:
    """Raise ConfigError for a type of weights that no GGUF file of ours has."""
    if kind not in GGUF_TYPES:
        close = nearest(kind, GGUF_TYPES)
        meant = f"did you mean {close}? Expected" if close else "expected"
        raise errors.ConfigError(
            f"--gguf is {kind!r}; {meant} one of {', '.join(GGUF_TYPES)}. Nothing was written."
        )


def other_sources(of_run: DataConfig, model_path: str, data: str) -> tuple[SourceConfig, ...]:
    """Return the sources that `--data` names: a path, or what a run file may have as `data.train`, as text.

    Columns and format that it leaves out are taken from the run's own data, which other data mostly look like.
    Raise ConfigError if it is not a source, DataError if it is not there.
    """
    # A section is YAML, as in a run file. A file may begin with a brace too.
    flags = {"model.path": model_path}
    overrides = []
    is_section = data.lstrip()[:1] in ("{", "[") and not Path(data).exists()
    if is_section:
        overrides.append(f"data.train={data}")
    else:
        flags["data.train"] = data

    sources = load_config(None, overrides=overrides, flags=flags).data.train
    weights = {source.weight for source in sources}
    if len(weights) == 1 and weights != {1.0}:
        raise errors.ConfigError(
            f"--data: found weight {weights.pop():g}, and no source of another weight; weights are the mix that "
            "several sources are evaluated in: leave it out. Nothing was evaluated."
        )
    require_sources({"train": sources})

    # A setting is taken over if all sources of the run have it.
    known = of_run.train
    if isinstance(of_run.eval, tuple):
        known = of_run.eval
    common = {}
    for key in ("columns", "format"):
        value = getattr(known[0], key)
        if all(getattr(source, key) == value for source in known):
            common[key] = value

    completed = []
    for source in sources:
        defaults = common.copy()
        for key in source.model_fields_set:
            defaults.pop(key, None)
        completed.append(source.model_copy(update=defaults))
    return tuple(completed)


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
