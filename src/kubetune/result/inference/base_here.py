"""The base, the tokenizer and the cache of a run as they are on this machine, and whether code of them may run.

A run from elsewhere names them by paths of that place. `--model` says where the base is here; a checkpoint has copies of
tokenizer and template.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kubetune import errors
from kubetune.base import logs, processes
from kubetune.config import consent
from kubetune.config.schema import Config, DataConfig, ModelConfig
from kubetune.config.schema.model import BUILT_IN_TEMPLATE
from kubetune.data.prepared import identity
from kubetune.data.reading.hub import is_local
from kubetune.models import quantization
from kubetune.result.inference.requirements import is_here, not_here
from kubetune.training.start import cpu_dtype


def model_here(
    settings: ModelConfig,
    run_dir: Path,
    checkpoint: Path,
    base_by_option: str | None,
    trust_code: str | None,
    *,
    is_adapter: bool,
) -> ModelConfig:
    """Return the section with names of base and tokenizer where they are here. `base_by_option`: `--model`.

    Raise ModelError if an adapter's base is not here, ConfigError for code that the user has not allowed.
    """
    if base_by_option is not None:
        path = base_by_option
        if is_local(path):
            path = str(Path(path).expanduser().absolute())
        # The same base by name is taken at the same commit, another one as it is now.
        commit = _commit(run_dir, path)
        settings = settings.model_copy(update={"path": path, "revision": commit})

    # A model that was trained whole needs nothing but its checkpoint.
    if not is_here(settings) and not is_adapter:
        settings = settings.model_copy(update={"path": str(checkpoint), "revision": None})
    if not is_here(settings):
        raise not_here(run_dir, settings.path)

    # Tokenizer and template likewise. Files from the hub then get the commit of the training.
    settings = _with_tokenizer(settings, checkpoint)
    settings = identity.pinned(settings, run_dir)
    if settings.trust_remote_code and is_adapter:
        settings = _with_pin(settings)
    # Code of the base, or of the checkpoint, runs only if the user has allowed it.
    if settings.trust_remote_code:
        # One digest stands for all of it.
        code = []
        if not is_adapter:
            code.append(consent.of_folder(checkpoint))
        if is_adapter or not is_local(settings.path):
            code += consent.of_model(settings)
        consent.require(code, run_dir, trust_code)
    return settings


def as_trained(config: Config, run_dir: Path) -> Config:
    """Return a run's config with what `auto` meant in training, whatever this machine has, and with a cache of here."""
    dtype = cpu_dtype.as_trained(run_dir, config.model.dtype)
    changed = {
        "data": _with_own_cache(config.data, run_dir),
        "model": config.model.model_copy(update={"dtype": dtype}),
        "quantization": quantization.as_trained(run_dir, config.quantization, config.lora),
    }
    return config.model_copy(update=changed)


def _with_own_cache(data: DataConfig, run_dir: Path) -> DataConfig:
    """Return the section with this user's cache, unless the run was started here, or is of this start, with another."""
    # A received run could have rows written anywhere.
    is_allowed = all(consent.is_allowed(cache) for cache in consent.of_cache(data))
    if is_allowed or consent.is_started(run_dir):
        return data
    logs.DATA.info(
        "data.cache of %s is %s, with which no run was started here; your own cache is used",
        run_dir,
        data.cache,
    )
    return data.model_copy(update={"cache": None})


def _with_pin(model: ModelConfig) -> ModelConfig:
    """Return the section with the digest of the model's code for a pin, if that lies in a folder of this machine."""
    if not is_local(model.path):
        return model
    # A folder has no commit, so what the user has read is known by its digest.
    pin = consent.folder_digest(Path(model.path).expanduser())
    return model.model_copy(update={"revision": pin})


def allowed_base(model: ModelConfig, run_dir: Path, trust_code: str | None) -> ModelConfig:
    """Return the section that the base is loaded by. Raise ConfigError for code that the user has not allowed."""
    if not model.trust_remote_code:
        return model
    model = _with_pin(model)
    consent.require(consent.of_model(model), run_dir, trust_code)
    return model


def require_room(model: Any, device: torch.device) -> None:
    """Raise EnvironmentFault if a second model of this size does not fit."""
    # As many bytes as the one that is loaded takes: the two have the same shapes.
    needed = 0
    for parameter in model.parameters():
        needed += parameter.numel() * parameter.element_size()
    if device.type == "cuda":
        free = torch.cuda.mem_get_info()[0]
    else:
        free = processes.free_memory_bytes()
    if free < needed:
        raise errors.EnvironmentFault(
            f"the model before fine-tuning needs {needed / 1e9:.1f} GB more, and {free / 1e9:.1f} GB are free; ask only "
            "the trained one, or use a machine with more memory"
        )


def _commit(run_dir: Path, path: str) -> str | None:
    """Return the commit of the hub that the run was trained on, if its base is asked for by the same name."""
    known = identity.read(run_dir).get("model")
    if known is None or known.path != path:
        return None
    return known.commit


def _with_tokenizer(model: ModelConfig, folder: Path) -> ModelConfig:
    """Return the section with the checkpoint's copy of tokenizer and template if those it names are not here."""
    lacks_tokenizer = False
    if model.tokenizer is not None and is_local(model.tokenizer):
        lacks_tokenizer = not Path(model.tokenizer).expanduser().is_dir()

    lacks_template = False
    if model.chat_template not in (None, BUILT_IN_TEMPLATE):
        lacks_template = not Path(model.chat_template).expanduser().is_file()
    if not lacks_tokenizer and not lacks_template:
        return model
    return model.model_copy(update={"tokenizer": str(folder), "chat_template": None})
