"""Settings of several runs side by side: only what differs, a row for each key; sources stand by their path."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kubetune.config.load import dotted_values
from kubetune.config.schema import SourceConfig

Row = tuple[str, list[str]]

_ABSENT = object()
_OF_PLACES = ("name", "output")
"""Differ in nearly all runs, and say nothing of their training."""


def differences(settings: Sequence[Mapping[str, Any]]) -> tuple[list[Row], list[tuple[str, str]]]:
    """Rows of what differs, with a text for each run, and what all have in common, of `resolved` settings."""
    found = _folded([_flat(one) for one in settings])
    different: list[Row] = []
    common: list[tuple[str, str]] = []
    for key in dict.fromkeys(key for one in found for key in one):
        values = [one.get(key, _ABSENT) for one in found]
        if key in _OF_PLACES:
            continue
        if all(value == values[0] for value in values):
            common.append((key, _text(values[0])))
        elif all(isinstance(value, dict) for value in values):
            inner = dict.fromkeys(
                name for value in values if isinstance(value, dict) for name in value
            )
            for name in inner:
                parts = [value.get(name, _ABSENT) for value in values if isinstance(value, dict)]
                if any(part != parts[0] for part in parts):
                    different.append((f"{key} · {name}", [_text(part) for part in parts]))
        else:
            different.append((key, [_text(value) for value in values]))
    return different, common


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Values by their dotted keys; each source by its path, with its other settings as one value."""
    flat: dict[str, Any] = {}
    for key, value in dotted_values(dict(settings)) if settings else ():
        if not (
            isinstance(value, list)
            and value
            and all(isinstance(one, dict) and "path" in one for one in value)
        ):
            flat[key] = value
            continue
        for source in value:
            name, count = f"{key}: {source['path']}", 1
            while name in flat:
                count += 1
                name = f"{key}: {source['path']} ({count})"
            flat[name] = {part: set_to for part, set_to in source.items() if part != "path"}
    return flat


def _folded(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sections that a run lacks as one value in the others, too: what is in them differs from nothing."""
    lacking = {key for one in found for key, value in one.items() if value is None}
    sections = {
        key for key in lacking if any(other.startswith(f"{key}.") for one in found for other in one)
    }
    folded: list[dict[str, Any]] = []
    for one in found:
        result: dict[str, Any] = {}
        for key, value in one.items():
            section = next((name for name in sections if key.startswith(f"{name}.")), None)
            if section is None:
                result[key] = value
            else:
                result.setdefault(section, {})[key.removeprefix(f"{section}.")] = value
        folded.append(result)
    return folded


def _text(value: Any) -> str:
    if value is _ABSENT:
        return "–"
    if value is None:
        return "not set"
    if isinstance(value, dict):
        defaults = SourceConfig.model_fields
        said = [
            f"{name} {_text(part)}"
            for name, part in value.items()
            if part is not None
            and part is not False
            and part not in ({}, [])
            and not (name in defaults and part == defaults[name].default)
        ]
        return ", ".join(said) or "set"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
