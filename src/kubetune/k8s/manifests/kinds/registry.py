"""The kinds of workload by their names in run files. Each is the module of that name beside this one."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import get_args

from kubetune.config.schema.cluster import KindName
from kubetune.k8s.manifests.kinds.kind import WorkloadKind

KINDS: tuple[str, ...] = get_args(KindName)


@cache
def kind_of(name: str) -> WorkloadKind:
    """Return the kind of this name in run files."""
    kind: WorkloadKind = import_module(f"{__package__}.{name}").KIND
    return kind


@cache
def kinds_by_object() -> dict[str, WorkloadKind]:
    """Return all kinds, by the Kubernetes names of their objects and of the objects that they need."""
    kinds: dict[str, WorkloadKind] = {}
    for name in KINDS:
        kind = kind_of(name)
        for resource in (kind.resource, *kind.others):
            kinds[resource.name] = kind
    return kinds
