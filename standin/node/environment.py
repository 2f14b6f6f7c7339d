"""A container's environment and the data of ConfigMaps and Secrets it is made from."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from typing import Any

from standin.settings import Image
from standin.state.objects import Object, namespace_of, quantity
from standin.state.store import Store

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_API_SERVER = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
"""What kubelets give every container, by which programs know that they are in a pod. Nothing answers there."""
_KEYED_FIELD = re.compile(r"metadata\.(labels|annotations)\['(.+)'\]")
_REFERENCE = re.compile(r"\$(\$|\(([-._a-zA-Z0-9]+)\))")


class Waiting(Exception):
    """The container cannot start yet: the reason kubectl shows, and a message."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason, self.message = reason, message


def field_value(pod: Object, path: str) -> str:
    """The downward API's `fieldRef`: a pod field as text, empty when it is not set."""
    if match := _KEYED_FIELD.fullmatch(path):
        return str((pod["metadata"].get(match[1]) or {}).get(match[2], ""))
    at: Any = pod
    for part in path.split("."):
        at = at.get(part, "") if isinstance(at, dict) else ""
    return at if isinstance(at, str) else json.dumps(at)


def keyed_data(store: Store, namespace: str, kind: str, reference: Object) -> dict[str, bytes]:
    """Contents of a ConfigMap or Secret; empty when it is missing and optional, else Waiting."""
    name = reference.get("name") or reference.get("secretName") or ""
    obj = store.get(kind, namespace, name)
    if obj is None:
        if reference.get("optional"):
            return {}
        raise Waiting("CreateContainerConfigError", f'{kind.lower()} "{name}" not found')
    data = obj.get("data") or {}
    if kind == "Secret":
        return {key: base64.b64decode(text) for key, text in data.items()}
    binary = {key: base64.b64decode(text) for key, text in (obj.get("binaryData") or {}).items()}
    return {key: text.encode() for key, text in data.items()} | binary


def expand(text: str, env: dict[str, str]) -> str:
    """`$(NAME)` → its value if there is one; `$$` → `$`."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[1] == "$" else env.get(match[2], match[0])

    return _REFERENCE.sub(value, text)


def environment(
    store: Store, pod: Object, container: Object, image: Image, home: str
) -> dict[str, str]:
    """All variables of one container, in the order Kubernetes resolves them; Waiting when a source is missing."""
    env = {
        "PATH": _PATH,
        "HOSTNAME": pod["spec"].get("hostname", pod["metadata"]["name"]),
        "HOME": home,
    }
    env |= _API_SERVER | image.env
    if image.path:
        env["PATH"] = f"{image.path}:{env['PATH']}"
    for source in container.get("envFrom", []):
        for kind, field in (("ConfigMap", "configMapRef"), ("Secret", "secretRef")):
            if field in source:
                data = keyed_data(store, namespace_of(pod), kind, source[field])
                env |= {
                    source.get("prefix", "") + key: value.decode() for key, value in data.items()
                }
    for entry in container.get("env", []):
        if "valueFrom" not in entry:
            env[entry["name"]] = expand(entry.get("value", ""), env)
        elif (value := _value_from(store, pod, container, entry["valueFrom"])) is not None:
            env[entry["name"]] = value
    return env


def _value_from(store: Store, pod: Object, container: Object, source: Object) -> str | None:
    if "fieldRef" in source:
        return field_value(pod, source["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in source:
        field, _, resource = source["resourceFieldRef"]["resource"].partition(".")
        return str(int(quantity(container.get("resources", {}).get(field, {}).get(resource, "0"))))
    kind = "ConfigMap" if "configMapKeyRef" in source else "Secret"
    reference = source.get("configMapKeyRef") or source["secretKeyRef"]
    namespace = namespace_of(pod)
    data = keyed_data(store, namespace, kind, reference)
    if reference["key"] in data:
        return data[reference["key"]].decode()
    if reference.get("optional"):
        return None
    where = f"{kind} {namespace}/{reference['name']}"
    raise Waiting("CreateContainerConfigError", f"couldn't find key {reference['key']} in {where}")


Projection = Callable[[str, bytes, int], None]


def project(store: Store, pod: Object, source: Object, write: Projection) -> None:
    """Call `write(path, content, mode)` for every file of a configMap, secret, downwardAPI or projected volume."""
    for part in (source.get("projected") or {}).get("sources", []) or [source]:
        for kind, field in (("ConfigMap", "configMap"), ("Secret", "secret")):
            reference = part.get(field)
            if reference is None:
                continue
            data = keyed_data(store, namespace_of(pod), kind, reference)
            items = reference.get("items") or [{"key": key, "path": key} for key in data]
            for item in items:
                write(
                    item["path"],
                    data[item["key"]],
                    item.get("mode", reference.get("defaultMode", 0o644)),
                )
        for item in (part.get("downwardAPI") or {}).get("items", []):
            write(item["path"], field_value(pod, item["fieldRef"]["fieldPath"]).encode(), 0o644)
