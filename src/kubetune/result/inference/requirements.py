"""Checks of what a run's result can be asked: its base, and the data or benchmarks to evaluate it on.

Only settings, names of files and their sizes are read. The verbs ask here before they load a model, and the page, which
has no torch, shows the same refusals.
"""

from __future__ import annotations

import os
from pathlib import Path

from kubetune import errors, extras
from kubetune.config.load import load_config
from kubetune.config.resolved import read_config
from kubetune.config.schema import Config, DataConfig, ModelConfig, SourceConfig
from kubetune.data.reading.hub import is_local, require_model
from kubetune.data.reading.sources import require_sources
from kubetune.rundir import checkpoints
from kubetune.rundir.adapter_settings import choose_trained


def require_result(run_dir: Path, which: str = "best", model: str | None = None) -> Config:
    """Return the config of a run that has this checkpoint, and whose base is to be had.

    `model`: the base as `--model` names it. Raise ConfigError for no run or no checkpoint, ModelError for an adapter
    whose base is neither here nor on a hub that can be reached, EnvironmentFault for a checkpoint that lacks something.
    """
    config = read_config(run_dir)
    checkpoint = choose_trained(run_dir, config.lora, which)
    # Checksums take as long as the weights are large, so they are compared while these are loaded.
    require_undamaged(checkpoint, checkpoints.verify(checkpoint, thorough=False))
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


def require_undamaged(checkpoint: Path, damage: str | None) -> None:
    """Raise EnvironmentFault for a checkpoint with which something is wrong, in the words of `checkpoints.verify`."""
    if damage:
        raise errors.EnvironmentFault(
            f"{checkpoint} {damage}; choose another --checkpoint. Nothing was loaded."
        )


def is_here(model: ModelConfig) -> bool:
    """True if the model can be looked for: on the hub, or in a folder that exists."""
    return not is_local(model.path) or Path(model.path).expanduser().is_dir()


def not_here(run_dir: Path, path: str) -> errors.ModelError:
    """Return the error for a base that this machine lacks."""
    return errors.ModelError(
        f"{run_dir} was made from the model {path}, a folder that is not on this machine; say where the model lies "
        "here, or its name on the hub: --model PATH|ID. Nothing was written."
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


def require_evaluation_data(data: DataConfig, run_dir: Path) -> None:
    """Raise ConfigError for a run without evaluation data."""
    if not data.eval:
        raise errors.ConfigError(f"{run_dir} has no evaluation data; give some with --data")


def require_benchmarks(run_dir: Path, task: str, *, answers_text: bool) -> None:
    """Raise ConfigError for a result that benchmarks cannot ask, or if they are not installed."""
    if not answers_text:
        raise errors.ConfigError(
            f"benchmarks are for models of text; {run_dir} is a run of task {task}"
        )
    extras.require("evaluation.benchmarks", "lm_eval")
