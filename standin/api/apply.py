"""Server-side apply: who owns which field, what conflicts, and what goes when its last owner drops it.

A field is addressed by a path of parts as in managedFields: `f:spec` is a key, `k:{"name":"x"}` an item of a list.

    "one" applies {a: 1, b: 1}        it owns a and b
    "two" applies {a: 1}              both own a
    "one" applies {}                  b goes, since nobody owns it; a stays, since "two" does
    "one" applies {a: 2}              409: conflict with "two": .data.a
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from standin.api.merge import merge_keys, strategic_map
from standin.state.errors import ApiError
from standin.state.objects import Object, now

Path = tuple[str, ...]

# Nobody owns what says which object it is.
_IDENTITY: set[Path] = {
    ("f:apiVersion",),
    ("f:kind",),
    ("f:metadata", "f:name"),
    ("f:metadata", "f:namespace"),
}
_APPLIED_METADATA = ("name", "namespace", "labels", "annotations", "finalizers", "ownerReferences")


def apply(old: Object | None, config: Object, manager: str, force: bool) -> Object:
    """Return the object after `manager` applied `config`. ApiError 409 when another manager owns a field it changes."""
    # Three sets of fields: those applied now, those this manager applied before, and those of others.
    config = _without_what_is_not_applied(config)
    mine = set(_leaves(config)) - _IDENTITY
    new = copy.deepcopy(old) if old else {}
    before: set[Path] = set()
    others = []
    still_owned: set[Path] = set()
    for entry in new.get("metadata", {}).get("managedFields", []):
        if entry["operation"] != "Apply":
            continue
        owned = set(_paths(entry["fieldsV1"]))
        if entry["manager"] == manager:
            before = owned
            continue
        clash = set()
        for path in mine & owned:
            if _lookup(old, path) != _lookup(config, path):
                clash.add(path)
        if clash and not force:
            raise _conflict(entry["manager"], clash)
        entry["fieldsV1"] = _tree(owned - clash)
        still_owned |= owned - clash
        others.append(entry)
    # Deeper fields first, so that what they leave empty can go with them.
    for path in sorted(before - mine - still_owned, key=len, reverse=True):
        _remove(new, path)
    new = strategic_map(new, copy.deepcopy(config))
    entry = {
        "manager": manager,
        "operation": "Apply",
        "apiVersion": config["apiVersion"],
        "time": now(),
        "fieldsType": "FieldsV1",
        "fieldsV1": _tree(mine),
    }
    new["metadata"]["managedFields"] = [*others, entry]
    return new


def _without_what_is_not_applied(config: Object) -> Object:
    """Return a configuration without its status, and without metadata that the server writes itself."""
    applied = {key: value for key, value in config.items() if key != "status"}
    metadata = {}
    for key, value in config["metadata"].items():
        if key in _APPLIED_METADATA:
            metadata[key] = value
    applied["metadata"] = metadata
    return applied


def _conflict(manager: str, paths: set[Path]) -> ApiError:
    names = []
    causes = []
    for path in sorted(paths):
        name = "." + ".".join(part[2:] for part in path)
        names.append(name)
        causes.append(
            {
                "reason": "FieldManagerConflict",
                "message": f'conflict with "{manager}"',
                "field": name,
            }
        )
    plural = "s" if len(names) > 1 else ""
    message = f'Apply failed with {len(names)} conflict{plural}: conflict with "{manager}": {", ".join(names)}'
    return ApiError(409, "Conflict", message, {"causes": causes})


def _leaves(value: Any, path: Path = (), field: str = "") -> Iterator[Path]:
    """Yield the paths of everything an applied configuration sets; an atomic list or an empty map is one leaf."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, "f:" + key), key)
        return
    keys = None
    if isinstance(value, list) and value:
        keys = merge_keys(field, value)
    if keys is None:
        yield path
        return
    for item in value:
        identity = {key: item[key] for key in keys if key in item}
        part = "k:" + json.dumps(identity, sort_keys=True, separators=(",", ":"))
        yield from _leaves(item, (*path, part))


def _lookup(value: Any, path: Path) -> Any:
    """Return what is at a path, None where there is nothing."""
    for part in path:
        if part.startswith("f:"):
            value = value.get(part[2:]) if isinstance(value, dict) else None
        else:
            value = _item(value or [], json.loads(part[2:]))
        if value is None:
            return None
    return value


def _item(items: list[Object], identity: Object) -> Object | None:
    """Return the item of a list that has these fields."""
    for item in items:
        if identity.items() <= item.items():
            return item
    return None


def _remove(obj: Object, path: Path) -> None:
    """Drop a field, then the list items and maps that became empty by it."""
    parent = _lookup(obj, path[:-1])
    if isinstance(parent, dict):
        parent.pop(path[-1][2:], None)
    for length in range(len(path) - 1, 0, -1):
        part = path[length - 1]
        value = _lookup(obj, path[:length])
        holder = _lookup(obj, path[: length - 1])
        is_item = part.startswith("k:") and isinstance(value, dict)
        # An item of which nothing is left but what it is known by.
        if is_item and set(value) <= set(json.loads(part[2:])):
            holder.remove(value)
        elif value == {} and isinstance(holder, dict):
            holder.pop(part[2:])
        else:
            break


def _tree(paths: set[Path]) -> Object:
    """Return a set of paths as the nested maps of fieldsV1."""
    tree: Object = {}
    for path in sorted(paths):
        node = tree
        for part in path:
            node = node.setdefault(part, {})
    return tree


def _paths(tree: Object, start: Path = ()) -> Iterator[Path]:
    """Yield the paths of the nested maps of fieldsV1."""
    if start and not tree:
        yield start
    for part, inner in tree.items():
        yield from _paths(inner, (*start, part))
