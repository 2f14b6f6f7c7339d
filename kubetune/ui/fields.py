"""Fields of the form for a new run, made from the schema of run files: a key is there as soon as the schema has it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from kubetune.config.consent import CODE
from kubetune.config.schema import Config

FIRST = (
    "name", "model.path", "data.train", "data.eval", "lora", "lora.r", "training.num_train_epochs",
    "training.learning_rate", "training.global_batch_size", "data.max_length",
)  # fmt: skip
"""Keys that stand at the top, since nearly every run sets them."""
LABELS = {
    "name": "Name",
    "model.path": "Model",
    "data.train": "Training data",
    "data.eval": "Evaluation data",
    "lora": "Method",
    "lora.r": "LoRA rank",
    "training.num_train_epochs": "Epochs",
    "training.learning_rate": "Learning rate",
    "training.global_batch_size": "Samples a step",
    "data.max_length": "Longest row, in tokens",
}
HINTS = {
    "name": "support-bot",
    "model.path": "Qwen/Qwen3-0.6B, or a folder",
    "data.train": "data/train.jsonl",
    "data.eval": "0.05, or a file",
}


@dataclass(frozen=True)
class Field:
    """One setting. `choices` are all its values where they can be counted; `hint` stands where nothing is typed."""

    key: str
    about: str
    hint: str
    choices: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """Words on it."""
        return LABELS.get(self.key, self.key)


@dataclass(frozen=True)
class Group:
    """The settings of one section of a run file."""

    name: str
    about: str
    fields: list[Field] = field(default_factory=list)


@cache
def form() -> tuple[list[Field], list[Group]]:
    """The settings at the top, and all others by section."""
    schema = Config.model_json_schema()
    groups: dict[str, Group] = {}
    first: dict[str, Field] = {}
    for found in _leaves(schema, schema["$defs"], ""):
        if found.key.startswith(CODE):
            continue
        if found.key in FIRST:
            first[found.key] = found
            continue
        section = found.key.partition(".")[0] if "." in found.key else "run"
        about = schema["properties"].get(section, {}).get("description", "The run as a whole.")
        groups.setdefault(section, Group(section, about)).fields.append(found)
    return [first[key] for key in FIRST], list(groups.values())


def _leaves(schema: Mapping[str, Any], defined: Mapping[str, Any], before: str) -> Iterator[Field]:
    for name, found in schema["properties"].items():
        key, kinds = (
            f"{before}{name}",
            [_followed(kind, defined) for kind in found.get("anyOf", [found])],
        )
        is_list = any(kind.get("type") == "array" for kind in kinds)
        section = None if is_list else next((kind for kind in kinds if "properties" in kind), None)
        may_be_left_out = any(kind.get("type") in ("null", "boolean") for kind in kinds)
        if section is None or may_be_left_out:
            yield Field(key, found.get("description", ""), _hint(key, found), _choices(key, kinds))
        if section is not None:
            yield from _leaves(section, defined, f"{key}.")


def _followed(kind: Mapping[str, Any], defined: Mapping[str, Any]) -> Mapping[str, Any]:
    name = kind.get("$ref", "").rpartition("/")[2]
    return defined[name] if name else kind


def _choices(key: str, kinds: list[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    if key == "lora":
        return (("", "full fine-tuning"), ("true", "LoRA"))
    values: list[Any] = []
    for kind in kinds:
        if "enum" in kind or "const" in kind:
            values += kind.get("enum", [kind.get("const")])
        elif kind.get("type") == "boolean":
            values += [True, False]
        elif kind.get("type") != "null" and "properties" not in kind:
            return ()  # something that only typing can say
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    return (("", "default"), *((text, text) for text in dict.fromkeys(texts))) if texts else ()


def _hint(key: str, found: Mapping[str, Any]) -> str:
    if key in HINTS:
        return HINTS[key]
    default = found.get("default")
    return "" if default is None else default if isinstance(default, str) else json.dumps(default)
