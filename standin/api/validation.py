"""Schema checks with the strict schemas kept in standin/schemas. What a schema cannot say is in rules.py."""

from __future__ import annotations

from typing import Any

from standin.schemas import validator
from standin.state.errors import Cause, bad_request
from standin.state.objects import Object
from standin.state.resources import BY_KIND


def check_schema(obj: Object, kubernetes_version: str, mode: str) -> tuple[list[str], list[Cause]]:
    """Return warnings and causes. Unknown fields: ApiError 400 in mode Strict, else pruned with a warning."""
    kind = obj["kind"]
    version = obj["apiVersion"].split("/")[-1]
    prefix = f'{kind} in version "{version}" cannot be handled as a {kind}'
    warnings: list[str] = []
    causes: list[Cause] = []
    schema = validator(obj["apiVersion"], kind, kubernetes_version)
    if schema is None:
        return warnings, causes
    for error in schema.iter_errors(obj):
        path = ".".join(str(part) for part in error.absolute_path)
        if error.validator == "additionalProperties" and isinstance(error.instance, dict):
            known = error.schema.get("properties", {})
            unknown = [key for key in error.instance if key not in known]
            warnings += [f'unknown field "{path + "." if path else ""}{key}"' for key in unknown]
            _prune(obj, list(error.absolute_path), unknown)
        # Of the built-in kinds decoding fails before they are validated.
        elif error.validator == "type" and not BY_KIND[kind].custom:
            raise bad_request(
                f"{prefix}: json: cannot unmarshal into field {path}: {error.message[:120]}"
            )
        else:
            causes.append(Cause(path, error.message[:200]))
    if warnings and mode == "Strict":
        raise bad_request(f"{prefix}: strict decoding error: " + ", ".join(warnings))
    return warnings, causes


def _prune(obj: Object, path: list[Any], keys: list[str]) -> None:
    """Take fields out of a section of an object."""
    section: Any = obj
    for part in path:
        section = section[part]
    for key in keys:
        section.pop(key, None)
