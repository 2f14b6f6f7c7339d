"""Small questions and edits on Kubernetes objects, which are plain dicts everywhere in this package."""

from __future__ import annotations

import random
import re
from datetime import UTC, datetime, timedelta
from typing import Any

Object = dict[str, Any]

# Annotation and label of an Indexed Job's pods.
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"

_STAMP = "%Y-%m-%dT%H:%M:%SZ"
_UNITS = {
    "": 1.0,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
}


def now(offset_seconds: float = 0.0) -> str:
    """Return the time in whole seconds, as objects have it."""
    return (datetime.now(UTC) + timedelta(seconds=offset_seconds)).strftime(_STAMP)


def seconds_since(stamp: str) -> float:
    """Return how long ago a time is."""
    then = datetime.strptime(stamp, _STAMP).replace(tzinfo=UTC)
    return (datetime.now(UTC) - then).total_seconds()


def random_suffix() -> str:
    """Return five characters as the API server appends to a generateName."""
    return "".join(random.choices("bcdfghjklmnpqrstvwxz2456789", k=5))


def quantity(text: object) -> float:
    """Return the number of a quantity: `500m` is 0.5, `2Gi` is 2147483648.0."""
    match = re.fullmatch(r"([\d.]+)([a-zA-Z]*)", str(text))
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"not a quantity: {text!r}")
    return float(match[1]) * _UNITS[match[2]]


def name_of(obj: Object) -> str:
    return str(obj["metadata"]["name"])


def namespace_of(obj: Object) -> str:
    return str(obj["metadata"].get("namespace", ""))


def uid_of(obj: Object) -> str:
    return str(obj["metadata"]["uid"])


def labels_of(obj: Object) -> dict[str, str]:
    return obj["metadata"].get("labels") or {}


def terminating(obj: Object) -> bool:
    return "deletionTimestamp" in obj["metadata"]


def owner_uids(obj: Object) -> list[str]:
    return [reference["uid"] for reference in obj["metadata"].get("ownerReferences", [])]


def owner_reference(owner: Object) -> Object:
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": name_of(owner),
        "uid": uid_of(owner),
        "controller": True,
        "blockOwnerDeletion": True,
    }


def phase(pod: Object) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))


def finished(pod: Object) -> bool:
    return phase(pod) in ("Succeeded", "Failed")


def container_statuses(pod: Object) -> list[Object]:
    """Return the statuses of the init containers, then of the others."""
    status = pod.get("status", {})
    return [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]


def containers_of(pod_spec: Object) -> list[Object]:
    """Return the init containers, then the others."""
    return [*pod_spec.get("initContainers", []), *pod_spec.get("containers", [])]


def condition(obj: Object, type_: str) -> Object | None:
    """Return the condition of that type, when it is true."""
    entry = find_condition(obj, type_)
    if entry and entry["status"] == "True":
        return entry
    return None


def find_condition(obj: Object, type_: str) -> Object | None:
    """Return the condition of that type, whatever its status."""
    return _of_type(obj.get("status", {}).get("conditions", []), type_)


def _of_type(conditions: list[Object], type_: str) -> Object | None:
    for entry in conditions:
        if entry["type"] == type_:
            return entry
    return None


def set_condition(
    status: Object, type_: str, value: str = "True", reason: str = "", message: str = ""
) -> bool:
    """Insert or replace a condition; return False when it said the same already."""
    conditions: list[Object] = status.setdefault("conditions", [])
    old = _of_type(conditions, type_)
    if old and (old["status"], old.get("reason"), old.get("message")) == (value, reason, message):
        return False
    new = {
        "type": type_,
        "status": value,
        "reason": reason,
        "message": message,
        "lastTransitionTime": now(),
    }
    if old:
        conditions[conditions.index(old)] = new
    else:
        conditions.append(new)
    return True


def pod_templates(obj: Object) -> list[tuple[str, Object]]:
    """Return the pod templates of a workload, each after the path of its spec; a Pod is its own template."""
    spec = obj.get("spec") or {}
    kind = obj["kind"]
    templates: list[tuple[str, Object]] = []
    if kind == "Pod":
        return [("spec", obj)]
    if kind in ("Job", "StatefulSet", "Deployment"):
        return [("spec.template.spec", spec.get("template") or {})]
    if kind == "JobSet":
        for index, job in enumerate(spec.get("replicatedJobs", [])):
            path = f"spec.replicatedJobs[{index}].template.spec.template.spec"
            templates.append((path, job["template"].get("spec", {}).get("template", {})))
    if kind == "PyTorchJob":
        for role, replica in spec.get("pytorchReplicaSpecs", {}).items():
            path = f"spec.pytorchReplicaSpecs[{role}].template.spec"
            templates.append((path, replica.get("template", {})))
    return templates


def claim_name(pod_name: str, volume: Object) -> str | None:
    """Return the claim behind a volume: named, or made for this pod by a generic ephemeral volume."""
    if "ephemeral" in volume:
        return f"{pod_name}-{volume['name']}"
    return (volume.get("persistentVolumeClaim") or {}).get("claimName")
