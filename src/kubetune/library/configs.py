"""Configs as functions take them: a Config, the path of a run file, or a mapping with its keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kubetune.base.files import StrPath
from kubetune.base.yaml_reader import FileText
from kubetune.config import load
from kubetune.config.schema import Config

# What a function takes as the config of a run: a config, the path of a run file, or its keys.
ConfigLike = Config | StrPath | Mapping[str, Any]


def load_config(
    source: StrPath | Mapping[str, Any],
    *,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Return the config of one run, from a run file or from a mapping with its keys.

    `overrides` are texts such as `"training.seed=1"`, which win over `source`. Environment variables
    are read from `environ` only, such as `os.environ`, which `kubetune train` reads. Relative paths are
    looked up beside the run file, then in the current folder.

    Raises:
        ConfigError: all problems, each with its place.
    """
    return load.load_config(source, overrides=overrides, environ=environ)


def config_of(source: ConfigLike | FileText) -> Config:
    """Return the config that an argument stands for. Raise ConfigError for what is wrong with it."""
    if isinstance(source, Config):
        return source
    return load.load_config(source)
