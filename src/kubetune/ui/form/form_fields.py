"""Fields of the form for a new run, made from the schema of run files, so that it has every key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from kubetune.config.consent import CODE
from kubetune.config.schema import Config

# Keys at the top of the form, since nearly every run sets them, and their labels.
LABELS = {
    "task": "Task",
    "lora": "Method",
    "model.path": "Model",
    "data.train": "Training data",
    "name": "Name of the run",
    "data.eval": "Evaluation data",
    "training.num_train_epochs": "Epochs",
    "training.global_batch_size": "Batch size",
    "training.learning_rate": "Learning rate",
    "lora.r": "Rank of the adapters",
    "data.max_length": "Longest row, in tokens",
}

# Descriptions of these keys for the form, in which nobody writes YAML.
ABOUT = {
    "task": "What the model is to learn.",
    "lora": "LoRA trains a small adapter next to the model; full fine-tuning changes every weight and needs far more "
    "memory.",
    "model.path": "A name on the Hugging Face hub, a folder that holds a model, or an image in a registry (`oci://registry/name:tag`).",
    "data.train": "A file, a folder or a data set of the hub: JSON lines, JSON, CSV, TSV, Parquet or text.",
    "name": "Small letters, digits and dashes, at most 40.",
    "data.eval": "A share of the rows that is held out to see what is learned, such as `0.05`, or a file of its own.",
    "training.num_train_epochs": "How often each row is seen.",
    "training.global_batch_size": "Rows that are learned from before each change of the weights, on all devices together.",
    "training.learning_rate": "How far each step changes the weights. Left empty, what suits the method.",
    "lora.r": "Larger adapters can learn more and take more memory. Of LoRA only.",
    "data.max_length": "Longer rows are left out and counted; texts to classify are cut.",
}

# Tasks, as people call them.
TASKS = {
    "causal_lm": "Chat and text",
    "preference": "Better and worse answers (DPO)",
    "reward_model": "Scores for answers (reward model)",
    "distill": "What a larger model would say (distillation)",
    "grpo": "Learning by reward (GRPO)",
    "sequence_classification": "Classes for texts",
    "vision_language": "Images and text",
}

# Hints in an empty field, if the default says too little.
HINTS = {
    "name": "support-bot",
    "model.path": "Qwen/Qwen3-0.6B, or a folder",
    "data.train": "data/train.jsonl",
    "data.eval": "0.05, or a file",
}


@dataclass(frozen=True)
class Field:
    """One setting."""

    key: str
    about: str
    hint: str  # shown while nothing is typed
    choices: tuple[tuple[str, str], ...] = ()  # values with labels, if there are few

    @property
    def label(self) -> str:
        """Its name on the form."""
        return LABELS.get(self.key, self.key)


@dataclass(frozen=True)
class FieldGroup:
    """The settings of one section of a run file."""

    name: str
    about: str
    fields: list[Field] = field(default_factory=list)


@cache
def form() -> tuple[list[Field], list[FieldGroup]]:
    """Return the settings at the top, and all others by section."""
    schema = Config.model_json_schema()
    groups: dict[str, FieldGroup] = {}
    first: dict[str, Field] = {}
    for leaf in _leaves(schema, schema["$defs"], ""):
        setting = replace(leaf, about=ABOUT.get(leaf.key, leaf.about))
        # The page never starts code that a browser names.
        if setting.key.startswith(CODE):
            continue
        if setting.key in LABELS:
            first[setting.key] = setting
            continue
        # A key without a section, such as `seed`, is one of the run as a whole.
        section = "run"
        if "." in setting.key:
            section = setting.key.partition(".")[0]
        about = schema["properties"].get(section, {}).get("description", "The run as a whole.")
        groups.setdefault(section, FieldGroup(section, about)).fields.append(setting)

    return [first[key] for key in LABELS], list(groups.values())


def _leaves(
    schema: Mapping[str, Any],
    definitions: Mapping[str, Any],
    prefix: str,
) -> Iterator[Field]:
    """Yield a field for each setting below a section of the schema.

    A section that may be left out, such as `lora`, is a setting too: it is set or not.
    """
    for name, node in schema["properties"].items():
        # The kinds of values that the key takes: {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/Lora"}]}
        key = prefix + name
        kinds = []
        for kind in node.get("anyOf", [node]):
            definition = kind.get("$ref", "").rpartition("/")[2]
            kinds.append(definitions[definition] if definition else kind)

        # A list of sections, such as sources, is typed as a whole.
        types = {kind.get("type") for kind in kinds}
        sections = []
        if "array" not in types:
            sections = [kind for kind in kinds if "properties" in kind]
        if not sections or not types.isdisjoint({"null", "boolean"}):
            about = node.get("description", "")
            yield Field(
                key,
                about,
                _hint(key, node.get("default")),
                _choices(key, kinds),
            )

        if sections:
            yield from _leaves(sections[0], definitions, f"{key}.")


def _choices(key: str, kinds: list[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    """Return all values of a setting with their labels, or () if they have to be typed."""
    if key == "lora":
        return (("", "full fine-tuning"), ("true", "LoRA"))
    if key == "task":
        return tuple(TASKS.items())
    values: list[Any] = []
    for kind in kinds:
        if "enum" in kind:
            values += kind["enum"]
        elif "const" in kind:
            values.append(kind["const"])
        elif kind.get("type") == "boolean":
            values += [True, False]
        # A kind of value that has to be typed, such as a number.
        elif kind.get("type") != "null" and "properties" not in kind:
            return ()

    if not values:
        return ()
    texts = dict.fromkeys(_text(value) for value in values)
    return (("", "default"), *((text, text) for text in texts))


def _hint(key: str, default: Any) -> str:
    """Return the hint in an empty field."""
    if key in HINTS:
        return HINTS[key]
    if default is None:
        return ""
    return _text(default)


def _text(value: Any) -> str:
    """Return a value as one types it."""
    if isinstance(value, str):
        return value
    return json.dumps(value)
