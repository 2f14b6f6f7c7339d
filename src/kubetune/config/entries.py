"""Settings from mappings, environment variables, flags and overrides, each with its origin."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kubetune.base.provenance import (
    Entry,
    KeyPath,
    Origin,
    Problem,
    dotted,
    key_path,
)
from kubetune.base.yaml_reader import TOO_LARGE, is_too_large, parse_value
from kubetune.config import json_schema
from kubetune.config.aliases import canonical
from kubetune.config.environment import read_variables

log = logging.getLogger(__name__)

MAPPING = Origin("config")


def from_environment(environ: Mapping[str, str], problems: list[Problem]) -> Iterator[Entry]:
    """Yield the settings of environment variables."""
    for key, text, origin in read_variables(environ):
        yield from _parsed(key, text, origin, problems)


def from_mapping(
    values: Mapping[Any, Any], path: KeyPath, problems: list[Problem]
) -> Iterator[Entry]:
    """Yield the settings of a mapping. Keys and values that no run file could hold are problems."""
    for key, value in values.items():
        here = (*path, key)
        if not isinstance(key, str):
            where = dotted(path) or "the top"
            problems.append(Problem(MAPPING, f"{where}: found the key {key!r}; expected a text"))
        elif isinstance(value, Mapping):
            yield Entry(here, {}, MAPPING)
            yield from from_mapping(value, here, problems)
        else:
            try:
                yield Entry(here, _plain(value), MAPPING)
            except TypeError as error:
                problems.append(Problem(MAPPING, f"{dotted(here)}: {error}"))


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: paths as text, tuples as lists. Raise TypeError for anything else."""
    # Python users pass paths and tuples, which a file does not have.
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if is_too_large(value):
        raise TypeError(TOO_LARGE)
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise TypeError(
        f"found a value of type {type(value).__name__}; expected text, a number, a list or a mapping"
    )


def from_flags(flags: Mapping[str, Any]) -> Iterator[Entry]:
    """Yield the settings of flags, by their dotted key."""
    for key, value in flags.items():
        yield Entry(tuple(key.split(".")), value, Origin("command line"))


def from_overrides(overrides: Sequence[str], problems: list[Problem]) -> Iterator[Entry]:
    """Yield the settings of `key=value` overrides in their order.

    A later override may change an earlier one, as wrappers around kubetune do; a warning says so.
    """
    seen: list[Entry] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        # `seed`, `=1` and `training.=1` are no overrides.
        if not equals or not all(key.split(".")):
            origin = Origin("command line")
            problems.append(
                Problem(origin, f"found {override!r}; expected key=value, such as training.seed=1")
            )
            continue
        for entry in _parsed(key, text.strip(), Origin("override"), problems):
            # Compared in our spelling: `lr=1` and `training.learning_rate=2` are one key.
            ours = canonical(entry) or entry
            parts = [ours]
            if isinstance(ours.value, Mapping):
                parts += from_mapping(ours.value, ours.path, [])
            # Wrappers append overrides to those of their users, so a second one is allowed.
            if any(_undoes(parts, earlier) for earlier in seen):
                log.warning("override %s: given twice, with other values; the last one counts", key)
            seen += parts
            yield entry


def _undoes(parts: Sequence[Entry], earlier: Entry) -> bool:
    """True if an override changes or removes what an earlier one set.

    `parts`: the override itself, then each key of it if it is a mapping. `lora={r: 8}` undoes `lora.r=16` and
    `lora.alpha=32`, but not `lora.r=8`.
    """
    path = parts[0].path
    if earlier.path[: len(path)] != path:
        return False
    return all((earlier.path, earlier.value) != (part.path, part.value) for part in parts)


def _parsed(key: str, text: str, origin: Origin, problems: list[Problem]) -> Iterator[Entry]:
    """Yield the entry of `key=text`, with the text read as YAML. What can only be text is not read: `name=123`."""
    entry = Entry(key_path(key), text, origin)
    ours = canonical(entry)
    is_section = entry.path == ("model",) and text.startswith("{")
    is_null = text in ("", "null", "~")
    is_text = ours is not None and json_schema.wants_text(ours.path)
    if is_text and not is_null and not is_section:
        yield entry
        return
    try:
        yield replace(entry, value=parse_value(text))
    except ValueError as error:
        problems.append(Problem(origin, f"{key}: {error}"))
