"""The scheduler: node selector, required pod anti-affinity by host, resources. First node that fits."""

from __future__ import annotations

from collections import Counter

from tests.cluster.standin.fake import LABELS
from tests.cluster.standin.objects import (
    Object,
    finished,
    labels_of,
    name_of,
    namespace_of,
    quantity,
    set_condition,
    terminating,
)

from .context import Context


def reconcile(context: Context) -> None:
    pods, nodes = context.store.list("Pod"), context.store.list("Node")
    for pod in pods:
        if pod["spec"].get("nodeName") or terminating(pod):
            continue
        full_name = f"{namespace_of(pod)}/{name_of(pod)}"
        status = pod.setdefault("status", {"phase": "Pending", "qosClass": "Burstable"})
        reasons: Counter[str] = Counter()
        for node in nodes:
            reason = "Insufficient nvidia.com/gpu" if context.faults.is_unschedulable(full_name) else None
            reason = reason or _misfit(pod, node, pods)
            if reason is None:
                pod["spec"]["nodeName"] = name_of(node)
                set_condition(status, "PodScheduled")
                message = f"Successfully assigned {full_name} to {name_of(node)}"
                context.store.event(pod, "Normal", "Scheduled", message)
                break
            reasons[reason] += 1
        else:
            listed = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
            message = f"0/{len(nodes)} nodes are available: {listed}."
            if set_condition(status, "PodScheduled", "False", "Unschedulable", message):
                context.store.event(pod, "Warning", "FailedScheduling", message)
        context.store.touch(pod)


def _misfit(pod: Object, node: Object, pods: list[Object]) -> str | None:
    """Why a pod cannot run on a node, in the scheduler's words; None when it can."""
    if node["spec"].get("unschedulable"):
        return "node(s) were unschedulable"
    wanted = pod["spec"].get("nodeSelector") or {}
    if LABELS.items() <= labels_of(node).items() and not LABELS.items() <= wanted.items():
        return "node(s) had untolerated taint {kwok.x-k8s.io/node: fake}"
    if not wanted.items() <= labels_of(node).items():
        return "node(s) didn't match Pod's node affinity/selector"
    here = [other for other in pods if other["spec"].get("nodeName") == name_of(node) and not finished(other)]
    anti = (pod["spec"].get("affinity") or {}).get("podAntiAffinity") or {}
    for term in anti.get("requiredDuringSchedulingIgnoredDuringExecution", []):
        unwanted = (term.get("labelSelector") or {}).get("matchLabels", {})
        same_namespace = [other for other in here if namespace_of(other) == namespace_of(pod)]
        if any(unwanted.items() <= labels_of(other).items() for other in same_namespace):
            return "node(s) didn't match pod anti-affinity rules"
    allocatable = node["status"]["allocatable"]
    for resource in sorted({*allocatable, *_extended_resources(pod)}):
        requested = sum(_request(other, resource) for other in [*here, pod])
        if requested > quantity(allocatable.get(resource, 0)):
            return f"Insufficient {resource}"
    return None


def _request(pod: Object, resource: str) -> float:
    """What a pod reserves; a limit counts where no request is given."""
    total = 0.0
    for container in pod["spec"]["containers"]:
        resources = container.get("resources", {})
        amounts = {**resources.get("limits", {}), **resources.get("requests", {})}
        total += quantity(amounts.get(resource, 0))
    return total


def _extended_resources(pod: Object) -> set[str]:
    limits = (container.get("resources", {}).get("limits", {}) for container in pod["spec"]["containers"])
    return {name for amounts in limits for name in amounts if "/" in name}
