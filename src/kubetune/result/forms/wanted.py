"""An export as the user asks for it, and the model that it is asked of. Reads settings and names of files only.

The verbs ask here before they import torch, and the page, which has no torch, shows the same refusals.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from kubetune import errors
from kubetune.config.naming import model_short_name
from kubetune.config.schema import Config, LoraConfig, ModelConfig
from kubetune.config.schema.model import DTYPE_NAMES

# Weights that transformers and PEFT load: of an adapter, of a base with its adapter merged, of a model trained whole.
Kind = Literal["adapter", "merged", "model"]

# The file of an export that says what it was made from, and what was proved.
PROVENANCE: Final = "provenance.json"

SHARD: Final = "5GB"


@dataclass(frozen=True)
class WantedExport:
    """An export as the options of `kubetune export` ask for it."""

    merged: bool = False  # adapters are put into the base's weights
    dtype: str | None = None  # of the weights; None: the base's
    gguf: str | None = None  # type of a GGUF file's weights, or `adapter`
    quantize: str | None = None  # name of a form
    out: Path | None = None
    max_shard_size: str = SHARD  # of a file of a model's weights; an adapter is one file


@dataclass(frozen=True)
class TrainedModel:
    """The settings of a run that decide the forms its model can be written in."""

    run_dir: Path
    model: ModelConfig
    lora: LoraConfig | None
    task: str  # `Config.task_name`
    answers_text: bool

    @classmethod
    def of(cls, config: Config, run_dir: Path) -> TrainedModel:
        """Return them from the config of a run."""
        return cls(run_dir, config.model, config.lora, config.task_name, config.answers_text)


def base_name(path: str) -> str:
    """Return the name of the base: its hub id, also of a folder of the hub's cache; else the folder's name."""
    # ~/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/… → Qwen/Qwen3-0.6B
    for part in Path(path).parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    if path.count("/") == 1 and not path.startswith((".", "~")):
        return path
    return model_short_name(path)


def require_adapter(trained: TrainedModel) -> None:
    """Raise ConfigError for a merge of a run that has no adapter."""
    if trained.lora is None:
        raise errors.ConfigError(
            f"{trained.run_dir} trained every weight, so there is no adapter to merge: leave --merge out"
        )


def require_dtype(name: str) -> None:
    """Raise ConfigError for a dtype that weights are not written in."""
    known = sorted(set(DTYPE_NAMES.values()))
    if DTYPE_NAMES.get(name, name) not in known:
        raise errors.ConfigError(
            f"--dtype is {name}; expected one of {', '.join(known)}. Nothing was written."
        )


def bytes_of(size: str) -> int:
    """Return `5GB` or `500MB` in bytes, as the hub's libraries count them. Raise ConfigError for other texts."""
    number = 0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])B", size.strip(), re.IGNORECASE)
    if match is not None:
        # 5 GB are 5 × 1000³ bytes.
        power = "KMGT".index(match[2].upper()) + 1
        number = int(float(match[1]) * 1000**power)
    if not number:
        raise errors.ConfigError(
            f"--max-shard-size is {size!r}; expected a size such as 5GB. Nothing was written."
        )
    return number


def place_of(run_dir: Path, checkpoint: str, form: str) -> Path:
    """Return the default folder of an export. `form`: its name, or `gguf-q8_0`."""
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
