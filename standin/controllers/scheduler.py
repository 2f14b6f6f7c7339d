"""The scheduler: node selector, required pod anti-affinity by host, resources, gangs. First node that fits.

It stands in for Volcano's too: pods of a PodGroup get nodes together or none does.
"""

from __future__ import annotations

from collections import Counter

from standin.controllers.context import Context
from standin.node.fake import LABELS
from standin.state.objects import (
    Object,
    finished,
    labels_of,
    name_of,
    namespace_of,
    quantity,
    set_condition,
    terminating,
    uid_of,
)

VOLCANO = "volcano"
_GROUP_NAME = "scheduling.k8s.io/group-name"

Gang = tuple[str, str]
"""Namespace and name of a PodGroup."""


def reconcile(context: Context) -> None:
    pods, nodes = context.store.list("Pod"), context.store.list("Node")
    waiting = [pod for pod in pods if not pod["spec"].get("nodeName") and not terminating(pod)]
    gangs: dict[object, list[Object]] = {}
    for pod in waiting:
        pod.setdefault("status", {"phase": "Pending", "qosClass": "Burstable"})
        gangs.setdefault(_group(pod) or uid_of(pod), []).append(pod)
    for group, members in gangs.items():
        refusals = _place(context, members, nodes, pods)
        if isinstance(group, tuple) and (lacking := _lacking(context, group, pods, refusals)):
            for pod in members:
                pod["spec"].pop("nodeName", None)
                refusals.setdefault(uid_of(pod), "")
            refusals = {
                uid: f"{lacking}; {refusal}".removesuffix("; ") for uid, refusal in refusals.items()
            }
        for pod in members:
            _tell(context, pod, refusals.get(uid_of(pod)))
            context.store.touch(pod)


def _place(
    context: Context, members: list[Object], nodes: list[Object], pods: list[Object]
) -> dict[str, str]:
    """Give each pod the first node that fits; for those that none fits, why, by uid."""
    refusals = {}
    for pod in members:
        reasons: Counter[str] = Counter()
        for node in nodes:
            is_never = context.faults.is_unschedulable(f"{namespace_of(pod)}/{name_of(pod)}")
            reason = "Insufficient nvidia.com/gpu" if is_never else _misfit(pod, node, pods)
            if any(map(context.faults.is_unbound, _claims(pod))):
                reason = "pod has unbound immediate PersistentVolumeClaims"
            if reason is None:
                pod["spec"]["nodeName"] = name_of(node)
                break
            reasons[reason] += 1
        else:
            listed = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
            refusals[uid_of(pod)] = f"0/{len(nodes)} nodes are available: {listed}."
    return refusals


def _tell(context: Context, pod: Object, refusal: str | None) -> None:
    full_name, status = f"{namespace_of(pod)}/{name_of(pod)}", pod["status"]
    if refusal is None:
        set_condition(status, "PodScheduled")
        message = f"Successfully assigned {full_name} to {pod['spec']['nodeName']}"
        context.store.event(pod, "Normal", "Scheduled", message)
    elif set_condition(status, "PodScheduled", "False", "Unschedulable", refusal):
        context.store.event(pod, "Warning", "FailedScheduling", refusal)


def make_group(context: Context, owner: Object, spec: Object) -> None:
    """Make the PodGroup of a job's pods, as its operator does, unless it is there."""
    if context.store.get("PodGroup", namespace_of(owner), name_of(owner)) is None:
        context.create(owner, "PodGroup", {"name": name_of(owner)}, spec)


def into_group(template: Object, name: str) -> None:
    """Put the pods of a template into a group, by the mark that Volcano looks for."""
    template.setdefault("metadata", {}).setdefault("annotations", {})[_GROUP_NAME] = name


def _group(pod: Object) -> Gang | None:
    """Namespace and name of the PodGroup that a pod of Volcano's belongs to."""
    name = (pod["metadata"].get("annotations") or {}).get(_GROUP_NAME)
    if not name or pod["spec"].get("schedulerName") != VOLCANO:
        return None
    return namespace_of(pod), name


def _lacking(
    context: Context, gang: Gang, pods: list[Object], refusals: dict[str, str]
) -> str | None:
    """Reason that keeps a gang from starting, with its pods placed as far as they fit; None where all is well."""
    namespace, name = gang
    group = context.store.get("PodGroup", namespace, name)
    if group is None:
        return f"pod group {namespace}/{name} is not found"
    least = group["spec"].get("minMember", 1)
    members = [
        pod for pod in pods if _group(pod) == gang and not finished(pod) and not terminating(pod)
    ]
    placed = [pod for pod in members if pod["spec"].get("nodeName")]
    if len(placed) >= least:
        return None
    return f"pod group is not ready, {len(members)} of {least} pods are there, {len(refusals)} fit on no node"


def _claims(pod: Object) -> list[str]:
    """`namespace/name` of the claims that a pod mounts."""
    sources = [volume.get("persistentVolumeClaim") for volume in pod["spec"].get("volumes", [])]
    return [f"{namespace_of(pod)}/{source['claimName']}" for source in sources if source]


def _misfit(pod: Object, node: Object, pods: list[Object]) -> str | None:
    """Reason why a pod cannot run on a node, in the scheduler's words; None when it can."""
    if node["spec"].get("unschedulable"):
        return "node(s) were unschedulable"
    wanted = pod["spec"].get("nodeSelector") or {}
    if LABELS.items() <= labels_of(node).items() and not LABELS.items() <= wanted.items():
        return "node(s) had untolerated taint {kwok.x-k8s.io/node: fake}"
    if not wanted.items() <= labels_of(node).items():
        return "node(s) didn't match Pod's node affinity/selector"
    here = [
        other
        for other in pods
        if other["spec"].get("nodeName") == name_of(node) and not finished(other)
    ]
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
    """Resources that a pod reserves; a limit counts where no request is given."""
    total = 0.0
    for container in pod["spec"]["containers"]:
        resources = container.get("resources", {})
        amounts = {**resources.get("limits", {}), **resources.get("requests", {})}
        total += quantity(amounts.get(resource, 0))
    return total


def _extended_resources(pod: Object) -> set[str]:
    limits = (
        container.get("resources", {}).get("limits", {}) for container in pod["spec"]["containers"]
    )
    return {name for amounts in limits for name in amounts if "/" in name}
