"""The server-side Tables that `kubectl get` prints."""

from __future__ import annotations

from collections.abc import Callable

from standin.state.objects import (
    Object,
    container_statuses,
    finished,
    name_of,
    phase,
    seconds_since,
    terminating,
)

Column = tuple[str, Callable[[Object], object]]


def table(kind: str, objects: list[Object], revision: object, with_header: bool = True) -> Object:
    """Rows of name, the kind's own columns, age. In a watch only the first Table has a header."""
    columns: list[Column] = [("Name", name_of), *_COLUMNS.get(kind, []), ("Age", _age)]
    definitions = [
        {
            "name": name,
            "type": "string",
            "format": "name" if name == "Name" else "",
            "description": "",
            "priority": 0,
        }
        for name, _ in columns
    ]
    rows = [
        {
            "cells": [value(obj) for _, value in columns],
            "object": {
                "kind": "PartialObjectMetadata",
                "apiVersion": "meta.k8s.io/v1",
                "metadata": obj["metadata"],
            },
        }
        for obj in objects
    ]
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": {"resourceVersion": str(revision)},
        "columnDefinitions": definitions if with_header else None,
        "rows": rows,
    }


def _age(obj: Object) -> str:
    seconds = int(seconds_since(obj["metadata"]["creationTimestamp"]))
    if seconds < 120:
        return f"{seconds}s"
    return f"{seconds // 60}m" if seconds < 7200 else f"{seconds // 3600}h"


def _pod_status(pod: Object) -> str:
    if terminating(pod) and not finished(pod):
        return "Terminating"
    for entry in container_statuses(pod):
        state = entry["state"]
        reason = state.get("waiting", {}).get("reason") or state.get("terminated", {}).get("reason")
        if reason and reason != "Completed":
            return str(reason)
    return "Completed" if phase(pod) == "Succeeded" else phase(pod)


def _pod_ready(pod: Object) -> str:
    ready = sum(entry["ready"] for entry in pod.get("status", {}).get("containerStatuses", []))
    return f"{ready}/{len(pod['spec']['containers'])}"


def _pod_restarts(pod: Object) -> int:
    return sum(
        entry["restartCount"] for entry in pod.get("status", {}).get("containerStatuses", [])
    )


def _ready_replicas(obj: Object) -> str:
    return f"{obj.get('status', {}).get('readyReplicas', 0)}/{obj['spec'].get('replicas', 1)}"


def _completions(job: Object) -> str:
    wanted = job["spec"].get("completions") or f"1 of {job['spec'].get('parallelism', 1)}"
    return f"{job.get('status', {}).get('succeeded', 0)}/{wanted}"


def _last_condition(obj: Object) -> str:
    conditions = obj.get("status", {}).get("conditions", [])
    return next((entry["type"] for entry in reversed(conditions) if entry["status"] == "True"), "")


def _status_field(field: str, otherwise: object) -> Callable[[Object], object]:
    return lambda obj: obj.get("status", {}).get(field, otherwise)


def _involved(event: Object) -> str:
    return f"{event['involvedObject']['kind'].lower()}/{event['involvedObject']['name']}"


_COLUMNS: dict[str, list[Column]] = {
    "Pod": [("Ready", _pod_ready), ("Status", _pod_status), ("Restarts", _pod_restarts)],
    "Job": [
        ("Status", lambda job: _last_condition(job) or "Running"),
        ("Completions", _completions),
    ],
    "StatefulSet": [("Ready", _ready_replicas)],
    "Deployment": [("Ready", _ready_replicas)],
    "Service": [
        ("Type", lambda service: service["spec"].get("type", "ClusterIP")),
        ("Cluster-IP", lambda service: service["spec"].get("clusterIP", "None")),
    ],
    "PersistentVolumeClaim": [
        ("Status", _status_field("phase", "Pending")),
        ("Access Modes", lambda claim: ",".join(claim["spec"]["accessModes"])),
    ],
    "Event": [
        ("Type", lambda event: event["type"]),
        ("Reason", lambda event: event["reason"]),
        ("Object", _involved),
        ("Message", lambda event: event["message"]),
    ],
    "JobSet": [
        ("TerminalState", _status_field("terminalState", "")),
        ("Restarts", _status_field("restarts", 0)),
    ],
    "PyTorchJob": [("State", _last_condition)],
    "TrainJob": [("State", _last_condition)],
    "Namespace": [
        ("Status", lambda namespace: "Terminating" if terminating(namespace) else "Active")
    ],
    "Node": [
        (
            "Status",
            lambda node: (
                "Ready,SchedulingDisabled" if node["spec"].get("unschedulable") else "Ready"
            ),
        )
    ],
}
