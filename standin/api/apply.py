"""Server-side apply: who owns which field, what conflicts, and what goes when its last owner drops it.

A field is addressed by a path of parts as in managedFields: `f:spec` is a key, `k:{"name":"x"}` an item of a list.
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

_IDENTITY: set[Path] = {
    ("f:apiVersion",),
    ("f:kind",),
    ("f:metadata", "f:name"),
    ("f:metadata", "f:namespace"),
}
_APPLIED_METADATA = ("name", "namespace", "labels", "annotations", "finalizers", "ownerReferences")


def apply(old: Object | None, config: Object, manager: str, force: bool) -> Object:
    """The object after `manager` applied `config`; ApiError 409 when another manager owns a field it changes."""
    config = {key: value for key, value in config.items() if key != "status"}
    config["metadata"] = {
        key: value for key, value in config["metadata"].items() if key in _APPLIED_METADATA
    }
    mine = set(_leaves(config)) - _IDENTITY
    new = copy.deepcopy(old) if old else {}
    entries = [
        entry
        for entry in new.get("metadata", {}).get("managedFields", [])
        if entry["operation"] == "Apply"
    ]
    before = next(
        (set(_paths(entry["fieldsV1"])) for entry in entries if entry["manager"] == manager), set()
    )
    others = [entry for entry in entries if entry["manager"] != manager]
    still_owned: set[Path] = set()
    for entry in others:
        owned = set(_paths(entry["fieldsV1"]))
        clash = {path for path in mine & owned if _lookup(old, path) != _lookup(config, path)}
        if clash and not force:
            raise _conflict(entry["manager"], clash)
        entry["fieldsV1"] = _tree(owned - clash)
        still_owned |= owned - clash
    for path in sorted(before - mine - still_owned, key=len, reverse=True):
        _remove(new, path)
    new = strategic_map(new, copy.deepcopy(config))
    own_entry = {
        "manager": manager,
        "operation": "Apply",
        "apiVersion": config["apiVersion"],
        "time": now(),
    }
    own_entry |= {"fieldsType": "FieldsV1", "fieldsV1": _tree(mine)}
    new["metadata"]["managedFields"] = [*others, own_entry]
    return new


def _conflict(manager: str, paths: set[Path]) -> ApiError:
    names = ["." + ".".join(part[2:] for part in path) for path in sorted(paths)]
    plural = "s" if len(names) > 1 else ""
    causes = [
        {"reason": "FieldManagerConflict", "message": f'conflict with "{manager}"', "field": name}
        for name in names
    ]
    message = f'Apply failed with {len(names)} conflict{plural}: conflict with "{manager}": {", ".join(names)}'
    return ApiError(409, "Conflict", message, {"causes": causes})


def _leaves(value: Any, path: Path = (), field: str = "") -> Iterator[Path]:
    """Paths of everything an applied configuration sets; an atomic list or an empty map is one leaf."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, "f:" + key), key)
    elif isinstance(value, list) and value and (keys := merge_keys(field, value)):
        for item in value:
            identity = {key: item[key] for key in keys if key in item}
            part = "k:" + json.dumps(identity, sort_keys=True, separators=(",", ":"))
            yield from _leaves(item, (*path, part))
    else:
        yield path


def _lookup(value: Any, path: Path) -> Any:
    for part in path:
        if part.startswith("f:"):
            value = value.get(part[2:]) if isinstance(value, dict) else None
        else:
            want = json.loads(part[2:])
            value = next((item for item in value or [] if want.items() <= item.items()), None)
        if value is None:
            return None
    return value


def _remove(obj: Object, path: Path) -> None:
    """Drop a field, then the list items and maps that became empty by it."""
    parent = _lookup(obj, path[:-1])
    if isinstance(parent, dict):
        parent.pop(path[-1][2:], None)
    for length in range(len(path) - 1, 0, -1):
        part, item, holder = (
            path[length - 1],
            _lookup(obj, path[:length]),
            _lookup(obj, path[: length - 1]),
        )
        if (
            part.startswith("k:")
            and isinstance(item, dict)
            and set(item) <= set(json.loads(part[2:]))
        ):
            holder.remove(item)
        elif item == {} and isinstance(holder, dict):
            holder.pop(part[2:])
        else:
            break


def _tree(paths: set[Path]) -> Object:
    """A set of paths as the nested maps of fieldsV1."""
    tree: Object = {}
    for path in sorted(paths):
        at = tree
        for part in path:
            at = at.setdefault(part, {})
    return tree


def _paths(tree: Object, at: Path = ()) -> Iterator[Path]:
    if not tree:
        yield at
    for part, inner in tree.items():
        yield from _paths(inner, (*at, part))
