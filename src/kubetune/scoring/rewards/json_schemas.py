"""The reward `json_schema`: 1 for an answer that is JSON of a schema.

The schema is inline or a file. References lead nowhere but within it: nothing is fetched.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kubetune.config.schema.rewards import RewardConfig
from kubetune.data.text.answer_targets import INVALID, parse_json, without_thoughts
from kubetune.errors import ConfigError
from kubetune.extras import require


def validator_of(reward: RewardConfig) -> Any:
    """Return what checks values by the schema of a reward.

    Raise MissingExtra without the package, ConfigError for a file or a schema that cannot be used.
    """
    require("rewards: json_schema", "jsonschema")
    from jsonschema import SchemaError, validators
    from referencing import Registry

    schema: Any = reward.settings.get("schema")
    place = "settings.schema"
    if reward.file is not None:
        place = reward.file
        schema = _read(Path(reward.file))

    # A schema says itself which draft it is written in; the newest one is taken for those that do not.
    kind = validators.validator_for(schema)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        where = "/".join(map(str, error.absolute_path)) or "its top"
        raise ConfigError(
            f"rewards: json_schema: {place} is no JSON schema: at {where}: {error.message}"
        ) from None
    return kind(schema, registry=Registry())


def _read(path: Path) -> dict[str, Any]:
    try:
        schema = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"rewards: json_schema: {path}: {error}; expected a JSON schema"
        ) from None
    if not isinstance(schema, dict):
        raise ConfigError(
            f"rewards: json_schema: {path}: found {type(schema).__name__}; expected an object"
        )
    return schema


def conforms(validator: Any, answer: str) -> float:
    """Return 1 if the answer, or the code block that it is, is JSON of the schema."""
    value = parse_json(without_thoughts(answer))
    if value is INVALID:
        return 0.0
    try:
        return float(validator.is_valid(value))
    except RecursionError:
        # `[[[[…` by a schema that calls itself: one answer must not cost the others their rewards.
        return 0.0
