"""Schema checks with the strict schemas kept in standin/schemas. What a schema cannot say is in rules.py."""

from __future__ import annotations

from typing import Any

from standin.schemas import validator
from standin.state.errors import Cause, bad_request
from standin.state.objects import Object
from standin.state.resources import BY_KIND


def check_schema(obj: Object, kubernetes_version: str, mode: str) -> tuple[list[str], list[Cause]]:
    """Warnings and causes. Unknown fields: ApiError 400 in mode Strict, else pruned with a warning."""
    kind, version = obj["kind"], obj["apiVersion"].split("/")[-1]
    prefix = f'{kind} in version "{version}" cannot be handled as a {kind}'
    warnings: list[str] = []
    causes: list[Cause] = []
    found = validator(obj["apiVersion"], kind, kubernetes_version)
    for error in found.iter_errors(obj) if found else ():
        path = ".".join(str(part) for part in error.absolute_path)
        if error.validator == "additionalProperties" and isinstance(error.instance, dict):
            unknown = [
                key for key in error.instance if key not in error.schema.get("properties", {})
            ]
            warnings += [f'unknown field "{path + "." if path else ""}{key}"' for key in unknown]
            _prune(obj, list(error.absolute_path), unknown)
        elif (
            error.validator == "type" and not BY_KIND[kind].custom
        ):  # decoding fails before validation there
            raise bad_request(
                f"{prefix}: json: cannot unmarshal into field {path}: {error.message[:120]}"
            )
        else:
            causes.append(Cause(path, error.message[:200]))
    if warnings and mode == "Strict":
        raise bad_request(f"{prefix}: strict decoding error: " + ", ".join(warnings))
    return warnings, causes


def _prune(obj: Object, path: list[Any], keys: list[str]) -> None:
    at: Any = obj
    for part in path:
        at = at[part]
    for key in keys:
        at.pop(key, None)
