"""A container's environment and the data of ConfigMaps and Secrets it is made from."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from typing import Any

from standin.settings import Image
from standin.state.objects import Object, namespace_of
from standin.state.store import Store

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# What kubelets give every container, by which programs know that they are in a pod. Nothing answers there.
_API_SERVER = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
_KEYED_FIELD = re.compile(r"metadata\.(labels|annotations)\['(.+)'\]")
_REFERENCE = re.compile(r"\$(\$|\(([-._a-zA-Z0-9]+)\))")


class Waiting(Exception):
    """The container cannot start yet: the reason kubectl shows, and a message."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


def field_value(pod: Object, path: str) -> str:
    """Return a pod field of the downward API's `fieldRef` as text, empty when it is not set."""
    if match := _KEYED_FIELD.fullmatch(path):
        return str((pod["metadata"].get(match[1]) or {}).get(match[2], ""))
    # metadata.name, status.podIP and so on.
    value: Any = pod
    for part in path.split("."):
        value = value.get(part, "") if isinstance(value, dict) else ""
    if isinstance(value, str):
        return value
    return json.dumps(value)


def keyed_data(store: Store, namespace: str, kind: str, reference: Object) -> dict[str, bytes]:
    """Return the contents of a ConfigMap or Secret; empty when it is missing and optional, else Waiting."""
    name = reference.get("name") or reference.get("secretName") or ""
    obj = store.get(kind, namespace, name)
    if obj is None:
        if reference.get("optional"):
            return {}
        raise Waiting("CreateContainerConfigError", f'{kind.lower()} "{name}" not found')
    contents = {}
    for key, text in (obj.get("data") or {}).items():
        contents[key] = base64.b64decode(text) if kind == "Secret" else text.encode()
    return contents


def expand(text: str, env: dict[str, str]) -> str:
    """Replace `$(NAME)` by its value if there is one, and `$$` by `$`."""

    def value(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return env.get(match[2], match[0])

    return _REFERENCE.sub(value, text)


def environment(
    store: Store, pod: Object, container: Object, image: Image, home: str
) -> dict[str, str]:
    """Return all variables of one container; Waiting when a source is missing.

    They are resolved in Kubernetes' order: the image's, whole ConfigMaps and Secrets, then one by one, each of which
    may name those before it.
    """
    env = {
        "PATH": _PATH,
        "HOSTNAME": pod["spec"].get("hostname", pod["metadata"]["name"]),
        "HOME": home,
        **_API_SERVER,
        **image.env,
    }
    if image.path:
        env["PATH"] = f"{image.path}:{env['PATH']}"
    for source in container.get("envFrom", []):
        for kind, field in (("ConfigMap", "configMapRef"), ("Secret", "secretRef")):
            if field in source:
                data = keyed_data(store, namespace_of(pod), kind, source[field])
                for key, content in data.items():
                    env[source.get("prefix", "") + key] = content.decode()
    for entry in container.get("env", []):
        if "valueFrom" not in entry:
            env[entry["name"]] = expand(entry.get("value", ""), env)
            continue
        value = _value_from(store, pod, entry["valueFrom"])
        if value is not None:
            env[entry["name"]] = value
    return env


def _value_from(store: Store, pod: Object, source: Object) -> str | None:
    """Return a value from a field of the pod, or a key; None where that is optional."""
    if "fieldRef" in source:
        return field_value(pod, source["fieldRef"]["fieldPath"])
    kind = "Secret"
    reference = source.get("secretKeyRef")
    if "configMapKeyRef" in source:
        kind = "ConfigMap"
        reference = source["configMapKeyRef"]
    assert reference is not None
    namespace = namespace_of(pod)
    data = keyed_data(store, namespace, kind, reference)
    if reference["key"] in data:
        return data[reference["key"]].decode()
    if reference.get("optional"):
        return None
    where = f"{kind} {namespace}/{reference['name']}"
    raise Waiting("CreateContainerConfigError", f"couldn't find key {reference['key']} in {where}")


# write(path, content, mode)
Projection = Callable[[str, bytes, int], None]


def project(store: Store, pod: Object, volume: Object, write: Projection) -> None:
    """Call `write` for every file of a configMap or secret volume."""
    for kind, field in (("ConfigMap", "configMap"), ("Secret", "secret")):
        reference = volume.get(field)
        if reference is None:
            continue
        data = keyed_data(store, namespace_of(pod), kind, reference)
        default_mode = reference.get("defaultMode", 0o644)
        items = reference.get("items") or [{"key": key, "path": key} for key in data]
        for item in items:
            write(item["path"], data[item["key"]], item.get("mode", default_mode))
