"""The object or objects that a request's URL names."""

from __future__ import annotations

from dataclasses import dataclass

from standin.state.errors import no_such_path
from standin.state.resources import Resource, resource_at


@dataclass(frozen=True)
class Target:
    """Object or objects that a request's URL names. An empty namespace means all of them, or a cluster-wide kind."""

    resource: Resource
    namespace: str
    name: str | None
    subresource: str | None


def parse_path(parts: list[str]) -> Target:
    """URL parts below the host, e.g. `apis batch v1 namespaces ml jobs fit status`; ApiError 404 if nothing is there."""
    head = 2 if parts[0] == "api" else 3
    if len(parts) <= head:
        raise no_such_path()
    group = "" if head == 2 else parts[1]
    version = parts[head - 1]
    rest = parts[head:]
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in ("status", "finalize"):
        namespace = rest[1]
        rest = rest[2:]
    resource = resource_at(group, version, rest[0])
    if resource is None or len(rest) > 3:
        raise no_such_path()
    # fit, status: what the URL leaves out is None.
    name, subresource = (*rest[1:], None, None)[:2]
    return Target(resource, namespace, name, subresource)
