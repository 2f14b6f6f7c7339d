"""Discovery, which clients ask before anything else: groups, versions, kinds and verbs, and a little OpenAPI."""

from __future__ import annotations

from standin.state.errors import no_such_path
from standin.state.objects import Object
from standin.state.resources import Resource

VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
AGGREGATED_TYPE = "application/json;g=apidiscovery.k8s.io;v={version};as=APIGroupDiscoveryList"
# Clients of Kubernetes 1.29 and before know the second one only.
_AGGREGATED_VERSIONS = ("v2", "v2beta1")
_PATCH_PARAMETERS = ("dryRun", "fieldManager", "fieldValidation", "force")


def _by_version(served: list[Resource], core: bool) -> dict[str, dict[str, list[Resource]]]:
    out: dict[str, dict[str, list[Resource]]] = {}
    for resource in served:
        if (resource.group == "") == core:
            out.setdefault(resource.group, {}).setdefault(resource.version, []).append(resource)
    return out


def aggregated_version(accept: str) -> str | None:
    """The newest version of aggregated discovery that a client takes; None where it takes none."""
    return next(
        (v for v in _AGGREGATED_VERSIONS if AGGREGATED_TYPE.format(version=v) in accept), None
    )


def aggregated(served: list[Resource], version: str, core: bool) -> Object:
    """The whole discovery of `/api` (core) or `/apis` in one document."""
    items = [
        {
            "metadata": {"name": group},
            "versions": [
                {
                    "version": version,
                    "freshness": "Current",
                    "resources": [_aggregated_entry(r) for r in resources],
                }
                for version, resources in versions.items()
            ],
        }
        for group, versions in _by_version(served, core).items()
    ]
    return {
        "kind": "APIGroupDiscoveryList",
        "apiVersion": f"apidiscovery.k8s.io/{version}",
        "metadata": {},
        "items": items,
    }


def _subresource_kind(resource: Resource, name: str) -> tuple[str, str, str]:
    """(group, version, kind) a subresource speaks; kubectl drain looks for the one of eviction."""
    if name == "eviction":
        return "policy", "v1", "Eviction"
    if name == "scale":
        return "autoscaling", "v1", "Scale"
    return resource.group, resource.version, resource.kind


def _subresource_verbs(name: str) -> list[str]:
    return ["get", "patch", "update"] if name in ("status", "scale") else ["create", "get"]


def _kind(group: str, version: str, kind: str) -> Object:
    return {"group": group, "version": version, "kind": kind}


def _aggregated_entry(resource: Resource) -> Object:
    return {
        "resource": resource.plural,
        "responseKind": _kind(resource.group, resource.version, resource.kind),
        "scope": "Namespaced" if resource.namespaced else "Cluster",
        "singularResource": resource.kind.lower(),
        "verbs": VERBS,
        "shortNames": list(resource.short_names),
        "categories": resource.categories,
        "subresources": [
            {
                "subresource": name,
                "responseKind": _kind(*_subresource_kind(resource, name)),
                "verbs": _subresource_verbs(name),
            }
            for name in resource.subresources
        ],
    }


def document(served: list[Resource], parts: list[str]) -> Object:
    """The plain discovery documents: `api`, `api/v1`, `apis`, `apis/GROUP`, `apis/GROUP/VERSION`."""
    if parts == ["api"]:
        return {"kind": "APIVersions", "versions": ["v1"]}
    groups = _by_version(served, core=parts[0] == "api")
    if parts == ["apis"]:
        listed = [_group(name, list(versions)) for name, versions in groups.items()]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
    group, version = (
        ("", parts[1]) if parts[0] == "api" else (parts[1], parts[2] if len(parts) > 2 else None)
    )
    if group not in groups or version not in (None, *groups[group]):
        raise no_such_path()
    if version is None:
        return {"kind": "APIGroup", "apiVersion": "v1", **_group(group, list(groups[group]))}
    rows = [row for resource in groups[group][version] for row in _plain_entries(resource)]
    group_version = f"{group}/{version}" if group else version
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": group_version,
        "resources": rows,
    }


def _group(name: str, versions: list[str]) -> Object:
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}


def _plain_entries(resource: Resource) -> list[Object]:
    own: Object = {
        "name": resource.plural,
        "singularName": resource.kind.lower(),
        "kind": resource.kind,
    }
    own |= {
        "verbs": VERBS,
        "namespaced": resource.namespaced,
        "shortNames": list(resource.short_names),
    }
    own |= {"categories": resource.categories}
    below = [
        {
            "name": f"{resource.plural}/{name}",
            "singularName": "",
            "namespaced": resource.namespaced,
            "verbs": _subresource_verbs(name),
            **_kind(*_subresource_kind(resource, name)),
        }
        for name in resource.subresources
    ]
    return [own, *below]


def openapi(served: list[Resource], parts: list[str], version: str) -> Object:
    """OpenAPI v3 as far as kubectl apply reads it: which kinds accept server-side field validation."""
    documents = {_openapi_path(resource) for resource in served}
    if not parts:
        return {
            "paths": {
                path: {"serverRelativeURL": f"/openapi/v3/{path}?hash=1"}
                for path in sorted(documents)
            }
        }
    wanted = "/".join(parts)
    if wanted not in documents:
        raise no_such_path()
    parameters = [
        {"name": name, "in": "query", "schema": {"type": "string"}} for name in _PATCH_PARAMETERS
    ]
    paths = {
        f"/{wanted}/{resource.plural}/{{name}}": {
            "patch": {
                "x-kubernetes-action": "patch",
                "x-kubernetes-group-version-kind": _kind(
                    resource.group, resource.version, resource.kind
                ),
                "parameters": parameters,
                "responses": {"200": {"description": "OK"}},
            }
        }
        for resource in served
        if _openapi_path(resource) == wanted
    }
    info = {"title": "standin", "version": version}
    return {"openapi": "3.0.0", "info": info, "paths": paths, "components": {"schemas": {}}}


def _openapi_path(resource: Resource) -> str:
    return f"{'apis' if resource.group else 'api'}/{resource.api_version}"
