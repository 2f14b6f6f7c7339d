"""`kubernetes.patches`: changes of rendered objects by the user, for fields that no key of the config sets.

A mapping is a strategic merge patch as kubectl and kustomize know it, for every kind: lists that pods consist of merge
by their key, others are replaced. A list is a JSON Patch (RFC 6902). Patches must not touch the names and labels by
which runs are found again, nor the containers of their pods.
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
from kubetune.k8s.manifests.run_spec import Manifest, kind_and_name

_DIRECTIVE: Final = "$patch"
_MEMBERS: Final = ("op", "path", "value", "from")
# Lists that merge item by item, and the keys by which items are the same.
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


class _Unfit(Exception):
    """A patch that cannot be laid over an object; its text says why."""


def patched(objects: Sequence[Manifest], patches: Sequence[PatchConfig]) -> list[Manifest]:
    """Return the objects with all patches, in their order. Raise ConfigError with everything wrong with them."""

    # All problems of all patches are reported at once. The objects are kept only if there are none.
    problems: list[str] = []
    result = list(objects)
    for number, patch in enumerate(patches):
        title = f"kubernetes.patches[{number}]"
        has_target = False
        for index, obj in enumerate(result):
            if not _is_target(obj, patch):
                continue
            has_target = True
            try:
                result[index] = _apply(obj, patch)
            except _Unfit as error:
                problems.append(f"{title}: {kind_and_name(obj)}: {error}")

        if not has_target:
            names = ", ".join(kind_and_name(obj) for obj in objects)
            suffix = ""
            if patch.target.name:
                suffix = f" called {patch.target.name}"
            problems.append(
                f"{title}: no {patch.target.kind}{suffix} is made here; there are {names}"
            )

    if problems:
        raise ConfigError([*problems, "Nothing was written."])
    return result


def _is_target(obj: Manifest, patch: PatchConfig) -> bool:
    target = patch.target
    # A target without a name is every object of its kind.
    has_name = target.name in (None, obj["metadata"]["name"])
    return obj["kind"] == target.kind and has_name


def effects(objects: Sequence[Manifest], patches: Sequence[PatchConfig]) -> Iterator[list[str]]:
    """Yield the objects that each patch changes, as `Job/name`; `objects` are as they were before the first."""
    for patch in patches:
        result = patched(objects, [patch])
        changed = []
        for before, after in zip(objects, result, strict=True):
            if before != after:
                changed.append(kind_and_name(after))
        yield changed
        # The next patch is laid over what this one made.
        objects = result


def _apply(obj: Manifest, patch: PatchConfig) -> Manifest:
    if isinstance(patch.patch, Mapping):
        if patch.patch.get(_DIRECTIVE) == "delete":
            raise _Unfit("a patch cannot remove a whole object; leave out the key that asks for it")
        result: Any = _merged(obj, patch.patch, "")
    else:
        result = _by_operations(obj, patch.patch)

    _require_same_identity(obj, result)
    return dict(result)


def _by_operations(obj: Manifest, operations: Sequence[Mapping[str, Any]]) -> Any:
    import jsonpatch

    # The library ignores members that it does not know, so a mistyped one would do nothing silently.
    for operation in operations:
        unknown = sorted(operation.keys() - _MEMBERS)
        if unknown:
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
        start, not_found, _ = str(error).partition(" not found in ")
        reason = f"{start} not found" if not_found else start
        raise _Unfit(f"not a JSON Patch that fits: {reason}") from None


def _merged(old: Any, change: Any, path: str) -> Any:
    """Return `change` laid over `old`. null removes a key, `$patch: replace` or `delete` a whole mapping or item.

    old                             change                          result
    {a: 1, b: 2}                    {b: null, c: 3}                 {a: 1, c: 3}
    {env: [{name: A, value: 1}]}    {env: [{name: B, value: 2}]}    {env: [A, B]}, merged by name
    {args: [x]}                     {args: [y]}                     {args: [y]}, no merge key
    """
    if not isinstance(change, Mapping):
        return deepcopy(change)
    _require_known_directives(change, path)

    # A scalar or list that becomes a mapping has nothing to be merged with.
    replaces = not isinstance(old, Mapping) or change.get(_DIRECTIVE) == "replace"
    result = {} if replaces else dict(deepcopy(old))
    for key, value in change.items():
        if key == _DIRECTIVE:
            continue
        key_path = f"{path}.{key}".removeprefix(".")
        previous = result.get(key)
        merge_keys = _MERGE_KEYS.get(key)
        if replaces:
            result[key] = _merged(None, value, key_path)
        elif value is None or _deletes(value):
            result.pop(key, None)
        elif merge_keys and isinstance(value, list) and isinstance(previous, list):
            result[key] = _merged_list(previous, value, merge_keys, key_path)
        else:
            result[key] = _merged(previous, value, key_path)
    return result


def _deletes(change: Any) -> bool:
    return isinstance(change, Mapping) and change.get(_DIRECTIVE) == "delete"


def _merged_list(old: list[Any], change: list[Any], keys: Sequence[str], path: str) -> list[Any]:
    """Return a list of mappings in which changed items replace those with the same key, and new ones are appended.

    `keys`: the first of these that an item has identifies it: `containerPort` of a pod's port, `port` of a Service's.
    """
    result = deepcopy(old)
    for item in change:
        key = _key_of(item, keys)
        if key is None:
            raise _Unfit(f"{path}: an item has no {' or '.join(keys)} to match it by: {item!r}")
        _require_known_directives(item, path)

        index = _index_of(result, key, item[key])
        if _deletes(item):
            if index is None:
                raise _Unfit(f"{path}: there is no {item[key]!r} to delete")
            del result[index]
        elif index is None:
            result.append(_merged(None, item, path))
        else:
            result[index] = _merged(result[index], item, f"{path}[{item[key]}]")
    return result


def _key_of(item: Any, keys: Sequence[str]) -> str | None:
    """Return the first of `keys` that an item has."""
    if isinstance(item, Mapping):
        for key in keys:
            if key in item:
                return key
    return None


def _index_of(items: list[Any], key: str, value: Any) -> int | None:
    for index, item in enumerate(items):
        if isinstance(item, Mapping) and item.get(key) == value:
            return index
    return None


def _require_known_directives(change: Mapping[str, Any], path: str) -> None:
    for key, value in change.items():
        is_known = key == _DIRECTIVE and value in ("delete", "replace")
        if key.startswith("$") and not is_known:
            raise _Unfit(
                f"{path or 'top'}: {key}: {value!r} is not understood; expected `$patch: delete` or `replace`"
            )


def _require_same_identity(before: Manifest, after: Any) -> None:
    """Raise _Unfit where the run could not be found again by its objects, or would not be this run any more."""
    if not isinstance(after, Mapping) or not isinstance(after.get("metadata"), Mapping):
        raise _Unfit("nothing of the object is left")
    for name in ("apiVersion", "kind"):
        if after.get(name) != before[name]:
            raise _Unfit(f"{name} may not be changed")

    # Under another name, `kubetune status` and `delete` would not find the object.
    for name in ("name", "namespace"):
        if after["metadata"].get(name) != before["metadata"].get(name):
            raise _Unfit(
                f"metadata.{name} may not be changed; `name` and `kubernetes.namespace` decide it"
            )

    if before["kind"] == "ConfigMap":
        _require_same_data(before, after)
    try:
        _require_same_pods(before, dict(after))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        # A patch may leave no templates where the kind has them, or fewer.
        raise _Unfit(
            f"it is no {before['kind']} any more: {type(error).__name__} {error}"
        ) from None


def _require_same_data(before: Manifest, after: Mapping[str, Any]) -> None:
    """Raise _Unfit if files that the run is made from differ from what the run file says. More may be added."""
    data = after.get("data") or {}
    changed = sorted(name for name, text in before["data"].items() if data.get(name) != text)
    if changed:
        raise _Unfit(
            f"data: {', '.join(changed)} may not be changed; the run file and its data decide it"
        )


def _require_same_pods(before: Manifest, after: Manifest) -> None:
    """Raise _Unfit for another number of pods, and for lost labels or containers."""
    if _sizes(before) != _sizes(after):
        raise _Unfit(
            "how many pods there are may not be changed: each waits for all; compute.nodes decides it"
        )
    _require_labels(before, after, "metadata")

    # Selectors and `kubetune logs` find pods by labels and containers by name. Containers may be added.
    templates = list(zip(pod_templates(before), pod_templates(after), strict=True))
    for (_, old), (title, new) in templates:
        _require_labels(old, new, title)
    for (_, old), (title, new) in templates:
        lost = sorted(_container_names(old) - _container_names(new))
        if lost:
            raise _Unfit(f"{title}: container {', '.join(lost)} may not be removed")


def _sizes(obj: Manifest) -> list[int]:
    """Return the numbers of pods a workload makes, and waits for the end of; nothing for other objects."""
    kind = kinds_by_object().get(obj["kind"])
    if kind is None:
        return []
    return [*pods_of(obj), *kind.completions(obj)]


def _container_names(template: Manifest) -> set[str]:
    return {container["name"] for container in template["spec"]["containers"]}


def _require_labels(old: Manifest, new: Mapping[str, Any], title: str) -> None:
    labels = (new.get("metadata") or {}).get("labels") or {}
    expected = (old.get("metadata") or {}).get("labels") or {}
    lost = sorted(key for key, value in expected.items() if labels.get(key) != value)
    if lost:
        raise _Unfit(f"{title}: label {', '.join(lost)} may not be changed, only others added")
