"""Discovery, which clients ask before anything else: groups, versions, kinds and verbs, and a little OpenAPI.

The plain documents alone. kubectl asks for all of them in one, too, and takes these where it does not get that.
"""

from __future__ import annotations

from standin.state.errors import no_such_path
from standin.state.objects import Object
from standin.state.resources import Resource

VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
_PATCH_PARAMETERS = ("dryRun", "fieldManager", "fieldValidation", "force")

# By group and version.
Groups = dict[str, dict[str, list[Resource]]]


def document(served: list[Resource], parts: list[str]) -> Object:
    """Return the document at `api`, `api/v1`, `apis`, `apis/GROUP` or `apis/GROUP/VERSION`."""
    is_core = parts[0] == "api"
    if parts == ["api"]:
        return {"kind": "APIVersions", "versions": ["v1"]}
    groups = _by_version(served, is_core)
    if parts == ["apis"]:
        listed = [_group(name, list(versions)) for name, versions in groups.items()]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
    group = "" if is_core else parts[1]
    if group not in groups:
        raise no_such_path()
    if parts == ["apis", group]:
        return {"kind": "APIGroup", "apiVersion": "v1", **_group(group, list(groups[group]))}
    version = parts[-1]
    if version not in groups[group]:
        raise no_such_path()
    entries: list[Object] = []
    for resource in groups[group][version]:
        entries += _entries(resource)
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{group}/{version}" if group else version,
        "resources": entries,
    }


def _by_version(served: list[Resource], is_core: bool) -> Groups:
    """Return the kinds of the core, or all others, by group and version."""
    groups: Groups = {}
    for resource in served:
        if (resource.group == "") == is_core:
            groups.setdefault(resource.group, {}).setdefault(resource.version, []).append(resource)
    return groups


def _group(name: str, versions: list[str]) -> Object:
    """Return a group with its versions, the preferred one first."""
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}


def _entries(resource: Resource) -> list[Object]:
    """Return the entry of a kind, and one for each of its subresources."""
    entries: list[Object] = [
        {
            "name": resource.plural,
            "singularName": resource.kind.lower(),
            "kind": resource.kind,
            "verbs": VERBS,
            "namespaced": resource.namespaced,
            "shortNames": list(resource.short_names),
            "categories": resource.categories,
        }
    ]
    for name in resource.subresources:
        entry = {
            "name": f"{resource.plural}/{name}",
            "singularName": "",
            "namespaced": resource.namespaced,
            "verbs": ["get", "patch", "update"] if name == "status" else ["create", "get"],
            "group": resource.group,
            "version": resource.version,
            "kind": resource.kind,
        }
        # kubectl drain looks for the kind that this subresource takes.
        if name == "eviction":
            entry.update(group="policy", kind="Eviction")
        entries.append(entry)
    return entries


def openapi(served: list[Resource], parts: list[str], version: str) -> Object:
    """Return OpenAPI v3 as far as kubectl apply reads it: which kinds accept server-side field validation."""
    documents = sorted({_openapi_path(resource) for resource in served})
    if not parts:
        links = {}
        for path in documents:
            links[path] = {"serverRelativeURL": f"/openapi/v3/{path}?hash=1"}
        return {"paths": links}
    wanted = "/".join(parts)
    if wanted not in documents:
        raise no_such_path()
    paths = {}
    for resource in served:
        if _openapi_path(resource) == wanted:
            paths[f"/{wanted}/{resource.plural}/{{name}}"] = {"patch": _patch_operation(resource)}
    info = {"title": "standin", "version": version}
    return {"openapi": "3.0.0", "info": info, "paths": paths, "components": {"schemas": {}}}


def _openapi_path(resource: Resource) -> str:
    """Return the path of the document that holds a kind."""
    return f"{'apis' if resource.group else 'api'}/{resource.api_version}"


def _patch_operation(resource: Resource) -> Object:
    """Return the description of a patch of a kind, with the parameters that it takes."""
    parameters = [
        {"name": name, "in": "query", "schema": {"type": "string"}} for name in _PATCH_PARAMETERS
    ]
    return {
        "x-kubernetes-action": "patch",
        "x-kubernetes-group-version-kind": {
            "group": resource.group,
            "version": resource.version,
            "kind": resource.kind,
        },
        "parameters": parameters,
        "responses": {"200": {"description": "OK"}},
    }
