"""The three patch formats of the API: JSON patch, merge patch, strategic merge patch. Pure functions on dicts.

Server-side apply, which needs field ownership as well, is in apply.py.
"""

from __future__ import annotations

import copy
from typing import Any

from standin.state.errors import ApiError
from standin.state.objects import Object

_MERGE_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "imagePullSecrets": ("name",),
    "conditions": ("type",),
    "ownerReferences": ("uid",),
    "replicatedJobs": ("name",),
    "runtimePatches": ("manager",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}


def merge_keys(field: str, items: list[Any]) -> tuple[str, ...] | None:
    """The keys that identify an item of an associative list; None when the list is replaced as a whole."""
    if not all(isinstance(item, dict) for item in items):
        return None
    if field == "ports":
        return ("containerPort",) if any("containerPort" in item for item in items) else ("port",)
    return _MERGE_KEYS.get(field)


def merge_patch(old: Any, patch: Any) -> Any:
    """RFC 7386: null removes, everything but objects is replaced."""
    if not isinstance(patch, dict):
        return patch
    out = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            out.pop(key, None)
        else:
            out[key] = merge_patch(out.get(key), value)
    return out


def json_patch(document: Object, operations: list[Object]) -> Object:
    """RFC 6902 without move and copy; ApiError 422 when an operation does not fit the document."""
    document = copy.deepcopy(document)
    for operation in operations:
        try:
            _operate(document, operation)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            message = f"the server rejected our request due to an error in our request: {operation}: {error}"
            raise ApiError(422, "Invalid", message) from error
    return document


def _operate(document: Object, operation: Object) -> None:
    *parents, last = [
        part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]
    ]
    at: Any = document
    for part in parents:
        at = at[int(part)] if isinstance(at, list) else at[part]
    index: Any = last
    if isinstance(at, list):
        index = len(at) if last == "-" else int(last)
    match operation["op"]:
        case "add" if isinstance(at, list):
            at.insert(index, operation["value"])
        case "add" | "replace":
            at[index] = operation["value"]
        case "remove":
            del at[index]
        case "test":
            if at[index] != operation["value"]:
                raise ValueError("test failed")
        case other:
            raise ValueError(f"operation {other} is not supported")


def strategic(old: Any, patch: Any, field: str = "") -> Any:
    """Kubernetes' own format: like a merge patch, but lists of named items are merged item by item."""
    if isinstance(patch, dict):
        return strategic_map(old if isinstance(old, dict) else {}, patch)
    if isinstance(patch, list) and patch and (keys := merge_keys(field, patch)):
        return _strategic_list(old or [], patch, keys)
    return patch


def strategic_map(old: Object, patch: Object) -> Object:
    """`strategic` for two objects."""
    if patch.get("$patch") == "replace":
        return {key: value for key, value in patch.items() if key != "$patch"}
    kept = patch.get("$retainKeys", old)
    out = {key: value for key, value in old.items() if key in kept}
    for key, value in patch.items():
        if key.startswith("$deleteFromPrimitiveList/"):
            target = key.partition("/")[2]
            out[target] = [item for item in out.get(target, []) if item not in value]
        elif key.startswith("$"):
            continue
        elif value is None or (isinstance(value, dict) and value.get("$patch") == "delete"):
            out.pop(key, None)
        else:
            out[key] = strategic(out.get(key), value, key)
    return out


def _strategic_list(old: list[Object], patch: list[Object], keys: tuple[str, ...]) -> list[Object]:
    def identity(item: Object) -> tuple[Any, ...]:
        return tuple(item.get(key) for key in keys)

    out = list(old)
    for entry in patch:
        directive = entry.get("$patch")
        if directive == "replace":
            out = []
        elif directive == "delete":
            out = [item for item in out if identity(item) != identity(entry)]
        elif any(identity(item) == identity(entry) for item in out):
            out = [
                strategic(item, entry) if identity(item) == identity(entry) else item
                for item in out
            ]
        else:
            out.append(strategic({}, entry))
    return out
