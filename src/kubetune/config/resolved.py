"""The whole config of a run, defaults included, as it is written into its run directory and read again."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML

from kubetune.base.files import read_inside, require_inside
from kubetune.base.provenance import (
    dotted,
)
from kubetune.config.naming import FOLDERS, RESOLVED
from kubetune.config.schema import Config
from kubetune.errors import ConfigError

_SHOWN_PROBLEMS = 3


def resolved(config: Config) -> dict[str, Any]:
    """Return the whole config, defaults included, as data for JSON. `load_resolved` reads it back equal."""
    return config.model_dump(mode="json", by_alias=True)


def values_by_path(data: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every value in `resolved` data with its path. Lists count as values, and keys may have dots in them."""
    if isinstance(data, dict) and data:
        for key, inner in data.items():
            yield from values_by_path(inner, (*path, key))
    else:
        yield path, data


def dotted_values(data: Any) -> Iterator[tuple[str, Any]]:
    """Yield every value in `resolved` data with its dotted path. Lists count as values."""
    return ((dotted(path), value) for path, value in values_by_path(data))


def load_resolved(source: Mapping[str, Any] | Path, where: str = "resolved config") -> Config:
    """Return the Config of `resolved` data, or of the JSON file that holds it. Raise ConfigError.

    `where` names the source of data for messages.
    """
    try:
        text: str | bytes
        if isinstance(source, Path):
            text = read_inside(source)
        else:
            text = json.dumps(source)
        return Config.model_validate_json(text, strict=True)
    except ValidationError as error:
        reason = "; ".join(problems_of(error)[:_SHOWN_PROBLEMS])
    except (OSError, ValueError, TypeError, RecursionError) as error:  # also what is no UTF-8
        reason = str(error)
    name = source if isinstance(source, Path) else where
    raise ConfigError(
        f"{name}: not a config written by this version of kubetune, or a damaged one: {reason}"
    )


def problems_of(error: ValidationError) -> list[str]:
    """Return what is wrong with the values of a config, each with its dotted key."""
    problems = []
    for detail in error.errors(include_url=False):
        # What several keys disagree about has no place in the config, and names them itself.
        text = f"{dotted(detail['loc'])}: {detail['msg'].removeprefix('Value error, ')}"
        problems.append(text.removeprefix(": "))
    return problems


def read_config(run_dir: Path) -> Config:
    """Return the config of a run. Raise ConfigError if the folder is no run directory.

    Raise EnvironmentFault if a folder in it is a link that leads out of the run directory.
    """
    if not run_dir.is_dir():
        # pathlib has made s3:/bucket of s3://bucket.
        if address := re.fullmatch(r"([a-z][a-z0-9]+):(/.*)?", str(run_dir)):
            scheme = address[1]
            raise ConfigError(
                f"{scheme}:/{address[2] or '/'}: is an address of an object store; expected a run directory: "
                f"`kubetune sync {scheme}://BUCKET/RUN FOLDER` fetches one"
            )
        raise ConfigError(
            f"{run_dir}: no such folder; expected a run directory (`kubetune runs` lists them)"
        )
    if not (run_dir / RESOLVED).exists():
        raise ConfigError(
            f"{run_dir} is no run directory: it has no resolved.json (`kubetune runs` lists them)"
        )
    # A received run directory may have `checkpoints` as a link to somewhere else.
    for name in FOLDERS:
        if (run_dir / name).is_symlink():
            require_inside(run_dir / name, run_dir)
    return load_resolved(run_dir / RESOLVED)


def as_yaml(config: Config) -> str:
    """Return the text of a run file that loads as an equal config. It names only what differs from the defaults."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    # In the order of the schema.
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    stream = io.StringIO()
    yaml.dump(config.model_dump(mode="json", by_alias=True, exclude_defaults=True), stream)
    return stream.getvalue()
