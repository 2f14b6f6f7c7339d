"""The settings of several runs side by side: a row for each key that differs. Sources are named by their path."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kubetune.base.humanize import place
from kubetune.config.resolved import dotted_values
from kubetune.config.schema import SourceConfig

Row = tuple[str, list[str]]
Values = dict[str, Any]

# The value of a key that a run does not have. None is a value.
_ABSENT = object()

# These differ in nearly all runs, and do not change how a run trains.
_OF_PLACES = ("name", "output")


def differences(settings: Sequence[Mapping[str, Any]]) -> tuple[list[Row], list[tuple[str, str]]]:
    """Return what differs, with a text for each run, and what all runs have in common.

    `settings`: the `resolved` config of each run.
    """
    runs = _joined_sections([_flat(of_run) for of_run in settings])
    different: list[Row] = []
    common: list[tuple[str, str]] = []
    for key in _keys_of(runs):
        if key in _OF_PLACES:
            continue
        values = _column(runs, key)
        if _are_equal(values):
            common.append((key, _text(values[0])))
        # A section or a source of all runs: a row for each of its settings that differs.
        elif all(isinstance(value, dict) for value in values):
            for name in _keys_of(values):
                parts = _column(values, name)
                if not _are_equal(parts):
                    different.append((f"{key} · {name}", list(map(_text, parts))))
        else:
            different.append((key, list(map(_text, values))))

    return different, common


def _column(values: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    """Return the value of a key in each mapping."""
    return [mapping.get(key, _ABSENT) for mapping in values]


def _keys_of(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys of all mappings, each once, in the order in which they come."""
    keys: dict[str, None] = {}
    for mapping in values:
        keys.update(dict.fromkeys(mapping))
    return list(keys)


def _are_equal(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)


def _flat(settings: Mapping[str, Any]) -> Values:
    """Return values by dotted key. A source has its path in its key, and its other settings as one value.

    Example: `data.train: [{path: a.jsonl, weight: 2}]` becomes `data.train: a.jsonl` = {weight: 2}.
    """
    flat: Values = {}
    if not settings:
        return flat
    for key, value in dotted_values(dict(settings)):
        if not _is_list_of_sources(value):
            flat[key] = value
            continue
        for source in value:
            # The same file may be a source twice, with other settings.
            path = place(source["path"])
            name = f"{key}: {path}"
            count = 1
            while name in flat:
                count += 1
                name = f"{key}: {path} ({count})"
            flat[name] = dict(source)
            del flat[name]["path"]

    return flat


def _is_list_of_sources(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(item, dict) and "path" in item for item in value)


def _joined_sections(runs: Sequence[Values]) -> list[Values]:
    """Join the keys of a section that some run does not have, so that the section gets one row.

    Example: a run with `lora: null` next to one with `lora.r: 8` and `lora.alpha: 16`. The second
    becomes `lora` = {r: 8, alpha: 16}.
    """
    # Sections that are off in some run and on in another.
    keys = _keys_of(runs)
    sections = []
    for run in runs:
        for section, value in run.items():
            if value is None and any(key.startswith(f"{section}.") for key in keys):
                sections.append(section)

    joined = []
    for run in runs:
        values: Values = {}
        for key, value in run.items():
            section, name = _split_key(key, sections)
            if section:
                # The section takes the place of its first key.
                values.setdefault(section, {})[name] = value
            else:
                values[key] = value

        joined.append(values)

    return joined


def _split_key(key: str, sections: Sequence[str]) -> tuple[str, str]:
    """Return the section that a key is in, "" for none, and the rest of the key."""
    for section in sections:
        if key.startswith(f"{section}."):
            return section, key.removeprefix(f"{section}.")
    return "", key


def _text(value: Any) -> str:
    """Return a value as a cell of the table."""
    if value is _ABSENT:
        return "–"
    if value is None:
        return "not set"
    if isinstance(value, dict):
        parts = []
        for name, part in value.items():
            if _is_set(name, part):
                parts.append(f"{name} {_text(part)}")
        return ", ".join(parts) or "used"

    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _is_set(name: str, value: Any) -> bool:
    """True if a setting of a source or a section says something that the reader cannot assume."""
    if value is None or value is False or value in ({}, []):
        return False
    # Defaults of a source need not be read.
    field = SourceConfig.model_fields.get(name)
    return field is None or value != field.default
