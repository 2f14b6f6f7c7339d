"""Configs as functions take them: made already, the path of a run file, or a mapping with the keys of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kubetune.base.files import StrPath
from kubetune.base.yaml_reader import FileText
from kubetune.config import load
from kubetune.config.schema import Config

ConfigLike = Config | StrPath | Mapping[str, Any]


def load_config(
    source: StrPath | Mapping[str, Any],
    *,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Config:
    """The config of one run, from a run file or from a mapping with its keys.

    `overrides` are texts such as `"training.seed=1"`, which win over `source`. Environment variables decide nothing
    unless `environ` is given, such as `os.environ`, in which `kubetune train` looks. Relative paths are looked for
    beside the run file, then in the current folder.

    Raises:
        ConfigError: everything that is wrong, each problem with its place.
    """
    return load.load_config(source, overrides=overrides, environ=environ)


def config_of(given: ConfigLike | FileText) -> Config:
    """The config that an argument stands for. Raises ConfigError."""
    return given if isinstance(given, Config) else load.load_config(given)
