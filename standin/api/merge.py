"""Two of the patch formats of the API: merge patch and strategic merge patch. Pure functions on dicts.

Server-side apply, which needs field ownership as well, is in apply.py.
"""

from __future__ import annotations

from typing import Any

from standin.state.objects import Object

# Fields that hold lists, and the keys by which items of theirs are known.
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
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}


def merge_keys(field: str, items: list[Any]) -> tuple[str, ...] | None:
    """Return the keys that identify an item of an associative list; None when the list is replaced as a whole."""
    if not all(isinstance(item, dict) for item in items):
        return None
    if field != "ports":
        return _MERGE_KEYS.get(field)
    # Containers and Services have ports of different shapes.
    if any("containerPort" in item for item in items):
        return ("containerPort",)
    return ("port",)


def merge_patch(old: Any, patch: Any) -> Any:
    """Merge as RFC 7386 says: null removes, everything but objects is replaced."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


def strategic(old: Any, patch: Any, field: str = "") -> Any:
    """Merge in Kubernetes' own format: like a merge patch, but lists of named items are merged item by item."""
    if isinstance(patch, dict):
        return strategic_map(old if isinstance(old, dict) else {}, patch)
    if isinstance(patch, list) and patch:
        keys = merge_keys(field, patch)
        if keys is not None:
            return _strategic_list(old or [], patch, keys)
    return patch


def strategic_map(old: Object, patch: Object) -> Object:
    """Merge two objects as `strategic` does."""
    if patch.get("$patch") == "replace":
        return {key: value for key, value in patch.items() if key != "$patch"}
    merged = dict(old)
    # kubectl apply names all keys that are to stay.
    if "$retainKeys" in patch:
        merged = {key: value for key, value in old.items() if key in patch["$retainKeys"]}
    for key, value in patch.items():
        if key.startswith("$"):
            continue
        if value is None or (isinstance(value, dict) and value.get("$patch") == "delete"):
            merged.pop(key, None)
        else:
            merged[key] = strategic(merged.get(key), value, key)
    return merged


def _strategic_list(old: list[Object], patch: list[Object], keys: tuple[str, ...]) -> list[Object]:
    """Merge a list item by item; items are the same if these keys are."""

    def identity(item: Object) -> tuple[Any, ...]:
        return tuple(item.get(key) for key in keys)

    merged = list(old)
    for entry in patch:
        directive = entry.get("$patch")
        places = [at for at, item in enumerate(merged) if identity(item) == identity(entry)]
        if directive == "replace":
            merged = []
        elif directive == "delete":
            merged = [item for item in merged if identity(item) != identity(entry)]
        elif places:
            for at in places:
                merged[at] = strategic(merged[at], entry)
        else:
            merged.append(strategic({}, entry))
    return merged
