"""Refusals as the API server answers them: a Kubernetes `Status` with the wording kubectl users know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from standin.state.resources import Resource

INVALID = "FieldValueInvalid"
REQUIRED = "FieldValueRequired"
FORBIDDEN = "FieldValueForbidden"
NOT_FOUND = "FieldValueNotFound"
NOT_SUPPORTED = "FieldValueNotSupported"


class ApiError(Exception):
    """One refused request: HTTP status code, machine-readable reason, message and details."""

    def __init__(
        self, code: int, reason: str, message: str, details: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details

    def status(self) -> dict[str, Any]:
        """Return the body of the answer."""
        body: dict[str, Any] = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "code": self.code,
            "reason": self.reason,
            "message": self.message,
        }
        if self.details:
            body["details"] = self.details
        return body


@dataclass(frozen=True)
class Cause:
    """One field that is wrong."""

    field: str
    message: str
    reason: str = INVALID

    def __str__(self) -> str:
        if self.reason == INVALID:
            return f"{self.field}: Invalid value: {self.message}"
        return f"{self.field}: {self.message}"


def unsupported(field: str, value: object, allowed: Sequence[str]) -> Cause:
    """Return the cause for a value outside an enumeration."""
    choices = ", ".join(f'"{choice}"' for choice in allowed)
    return Cause(field, f'Unsupported value: "{value}": supported values: {choices}', NOT_SUPPORTED)


def _details(resource: Resource, name: str) -> dict[str, Any]:
    return {"name": name, "group": resource.group, "kind": resource.plural}


def no_such_path() -> ApiError:
    return ApiError(404, "NotFound", "the server could not find the requested resource")


def not_found(resource: Resource, name: str) -> ApiError:
    message = f'{resource.group_resource} "{name}" not found'
    return ApiError(404, "NotFound", message, _details(resource, name))


def already_exists(resource: Resource, name: str) -> ApiError:
    message = f'{resource.group_resource} "{name}" already exists'
    return ApiError(409, "AlreadyExists", message, _details(resource, name))


def modified(resource: Resource, name: str) -> ApiError:
    message = (
        f'Operation cannot be fulfilled on {resource.group_resource} "{name}": the object has been modified; '
        "please apply your changes to the latest version and try again"
    )
    return ApiError(409, "Conflict", message, _details(resource, name))


def bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def forbidden(message: str, details: dict[str, Any] | None = None) -> ApiError:
    return ApiError(403, "Forbidden", message, details)


def unsupported_media_type(message: str) -> ApiError:
    return ApiError(415, "UnsupportedMediaType", message)


def invalid(resource: Resource, name: str, causes: Sequence[Cause]) -> ApiError:
    """Return a 422 with every cause, in one message and in the details."""
    kind = resource.kind
    if resource.group:
        kind += f".{resource.group}"
    text = ", ".join(map(str, causes))
    if len(causes) > 1:
        text = f"[{text}]"
    listed = []
    for cause in causes:
        listed.append({"reason": cause.reason, "message": cause.message, "field": cause.field})
    details = {"name": name, "group": resource.group, "kind": resource.kind, "causes": listed}
    return ApiError(422, "Invalid", f'{kind} "{name}" is invalid: {text}', details)
