"""`kubernetes.patches`: what the user lays over rendered objects, for fields that no key of the config sets.

A mapping is a strategic merge patch as kubectl and kustomize know it, in every kind: lists that pods are made of merge
by their key, others are replaced. A list is a JSON Patch (RFC 6902). What a patch must not touch is refused here: the
names and labels by which runs are found again, and the containers that they are made of.
Source: Kubernetes' strategic merge patch, with the merge keys of its OpenAPI.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Final

from kubetune.config.schema.cluster import PatchConfig
from kubetune.errors import ConfigError, first_line
from kubetune.k8s.manifests.kinds.registry import kinds_by_object
from kubetune.k8s.manifests.pod_templates import pod_templates, pods_of
from kubetune.k8s.manifests.spec import Manifest, kind_and_name

_DIRECTIVE: Final = "$patch"
_MEMBERS: Final = ("op", "path", "value", "from")
_MERGE_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "ports": ("containerPort", "port"),
    "imagePullSecrets": ("name",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey",),
    "resourceClaims": ("name",),
    "claims": ("name",),
    "schedulingGates": ("name",),
    "replicatedJobs": ("name",),
}
"""Lists that merge item by item, and the key that tells items apart."""


class _Unfit(ValueError):
    """A patch that cannot be laid over an object; its text says why."""


def patched(objects: Sequence[Manifest], patches: Sequence[PatchConfig]) -> list[Manifest]:
    """The objects with all patches, in their order. Raises ConfigError with everything that is wrong with them."""
    problems: list[str] = []
    found = list(objects)
    for number, patch in enumerate(patches):
        where, meant = f"kubernetes.patches[{number}]", list(_meant(found, patch))
        if not meant:
            there = ", ".join(map(kind_and_name, objects))
            name = f" called {patch.target.name}" if patch.target.name else ""
            problems.append(
                f"{where}: no {patch.target.kind}{name} is made here; there are {there}"
            )
        for place in meant:
            try:
                found[place] = _apply(found[place], patch)
            except _Unfit as error:
                problems.append(f"{where}: {kind_and_name(found[place])}: {error}")
    if problems:
        raise ConfigError([*problems, "Nothing was written."])
    return found


def _meant(objects: Sequence[Manifest], patch: PatchConfig) -> Iterator[int]:
    for place, obj in enumerate(objects):
        if obj["kind"] == patch.target.kind and patch.target.name in (
            None,
            obj["metadata"]["name"],
        ):
            yield place


def effects(objects: Sequence[Manifest], patches: Sequence[PatchConfig]) -> Iterator[list[str]]:
    """Objects that each patch changes, as `Job/name`; `objects` are as they were before the first."""
    for patch in patches:
        made = patched(objects, [patch])
        yield [kind_and_name(new) for old, new in zip(objects, made, strict=True) if old != new]
        objects = made


def _apply(obj: Manifest, patch: PatchConfig) -> Manifest:
    if isinstance(patch.patch, Mapping):
        if patch.patch.get(_DIRECTIVE) == "delete":
            raise _Unfit(
                "a patch cannot take a whole object away; leave out the key that asks for it"
            )
        made: Any = _merged(obj, patch.patch, "")
    else:
        made = _by_operations(obj, patch.patch)
    _require_same_identity(obj, made)
    return dict(made)


def _by_operations(obj: Manifest, operations: Sequence[Mapping[str, Any]]) -> Any:
    import jsonpatch

    for operation in operations:
        if unknown := sorted(operation.keys() - _MEMBERS):
            raise _Unfit(
                f"not a JSON Patch that fits: {', '.join(unknown)} is none of {', '.join(_MEMBERS)}"
            )
    try:
        return jsonpatch.apply_patch(obj, [dict(operation) for operation in operations])
    except jsonpatch.JsonPatchTestFailed as error:
        raise _Unfit(f"its test does not hold: {first_line(error)}") from None
    except (
        jsonpatch.JsonPatchException,
        jsonpatch.JsonPointerException,
        KeyError,
        TypeError,
        ValueError,
    ) as error:
        # The library shows the whole object where a path leads nowhere.
        said = str(error).partition(" not found in ")[0] + (
            " not found" if " not found in " in str(error) else ""
        )
        raise _Unfit(f"not a JSON Patch that fits: {said}") from None


def _merged(old: Any, change: Any, path: str) -> Any:
    """`change` laid over `old`; null removes a key, `$patch: replace` or `delete` a whole mapping or item."""
    if not isinstance(change, Mapping):
        return deepcopy(change)
    _require_known_directives(change, path)
    if not isinstance(old, Mapping) or change.get(_DIRECTIVE) == "replace":
        return {
            key: _merged(None, value, f"{path}.{key}")
            for key, value in change.items()
            if key != _DIRECTIVE
        }
    made = dict(deepcopy(old))
    for key, value in change.items():
        here = f"{path}.{key}".removeprefix(".")
        if key == _DIRECTIVE:
            continue
        if value is None or (isinstance(value, Mapping) and value.get(_DIRECTIVE) == "delete"):
            made.pop(key, None)
        elif isinstance(value, list) and key in _MERGE_KEYS and isinstance(made.get(key), list):
            made[key] = _merged_list(made[key], value, _MERGE_KEYS[key], here)
        else:
            made[key] = _merged(made.get(key), value, here)
    return made


def _merged_list(old: list[Any], change: list[Any], keys: Sequence[str], path: str) -> list[Any]:
    made = deepcopy(old)
    for item in change:
        key = next((key for key in keys if isinstance(item, Mapping) and key in item), None)
        if key is None:
            raise _Unfit(
                f"{path}: an item has no {' or '.join(keys) or 'key'} to find its like by: {item!r}"
            )
        _require_known_directives(item, path)
        same = [
            place
            for place, there in enumerate(made)
            if isinstance(there, Mapping) and there.get(key) == item[key]
        ]
        if item.get(_DIRECTIVE) == "delete":
            if not same:
                raise _Unfit(f"{path}: there is no {item[key]!r} to delete")
            del made[same[0]]
        elif same:
            made[same[0]] = _merged(made[same[0]], item, f"{path}[{item[key]}]")
        else:
            made.append(_merged(None, item, path))
    return made


def _require_known_directives(change: Mapping[str, Any], path: str) -> None:
    for key, value in change.items():
        if key.startswith("$") and (key, value) not in (
            (_DIRECTIVE, "delete"),
            (_DIRECTIVE, "replace"),
        ):
            raise _Unfit(
                f"{path or 'top'}: {key}: {value!r} is not understood; expected `$patch: delete` or `replace`"
            )


def _require_same_identity(before: Manifest, after: Any) -> None:
    """Raise _Unfit where a run could not be found again, or is none any more."""
    if not isinstance(after, Mapping) or not isinstance(after.get("metadata"), Mapping):
        raise _Unfit("nothing of the object is left")
    for name in ("apiVersion", "kind"):
        if after.get(name) != before[name]:
            raise _Unfit(f"{name} may not be changed")
    for name in ("name", "namespace"):
        if after["metadata"].get(name) != before["metadata"].get(name):
            raise _Unfit(
                f"metadata.{name} may not be changed; `name` and `kubernetes.namespace` decide it"
            )
    if before["kind"] == "ConfigMap":
        _require_same_data(before, after)
    try:
        if _sizes(before) != _sizes(dict(after)):
            raise _Unfit(
                "how many pods there are may not be changed: each waits for all; compute.nodes decides it"
            )
        parts = [
            (("", before), ("", after)),
            *zip(pod_templates(before), pod_templates(dict(after)), strict=True),
        ]
        for (_, old), (where, new) in parts:
            _require_labels(old, new, where)
        for (_, old), (where, new) in parts[1:]:
            names = [
                {container["name"] for container in template["spec"]["containers"]}
                for template in (old, new)
            ]
            if lost := names[0] - names[1]:
                raise _Unfit(f"{where}: container {', '.join(sorted(lost))} may not be removed")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, _Unfit):
            raise
        raise _Unfit(
            f"it is no {before['kind']} any more: {type(error).__name__} {error}"
        ) from None


def _sizes(obj: Manifest) -> list[int]:
    """Return the numbers of pods a workload makes, and waits for the end of; nothing for what is beside the run."""
    kind = kinds_by_object().get(obj["kind"])
    return [] if kind is None else [*pods_of(obj), *kind.completions(obj)]


def _require_same_data(before: Manifest, after: Mapping[str, Any]) -> None:
    """Raise _Unfit where files that a run is made from would be others than the run file says; more may be added."""
    found = after.get("data") or {}
    if lost := sorted(name for name, text in before["data"].items() if found.get(name) != text):
        raise _Unfit(
            f"data: {', '.join(lost)} may not be changed; the run file and its data decide it"
        )


def _require_labels(old: Manifest, new: Mapping[str, Any], where: str) -> None:
    wanted = (old.get("metadata") or {}).get("labels") or {}
    found = (new.get("metadata") or {}).get("labels") or {}
    if lost := sorted(key for key, value in wanted.items() if found.get(key) != value):
        raise _Unfit(
            f"{where or 'metadata'}: label {', '.join(lost)} may not be changed, only others added"
        )
