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

# Namespace and name of a PodGroup.
Gang = tuple[str, str]


def reconcile(context: Context) -> None:
    """Give nodes to the pods that wait for one."""
    pods = context.store.list("Pod")
    nodes = context.store.list("Node")
    # By their PodGroup; a pod without one is alone.
    waiting: dict[object, list[Object]] = {}
    for pod in pods:
        if not pod["spec"].get("nodeName") and not terminating(pod):
            pod.setdefault("status", {"phase": "Pending", "qosClass": "Burstable"})
            waiting.setdefault(_group(pod) or uid_of(pod), []).append(pod)
    # A pod that gets a node takes its resources from those after it.
    for group, members in waiting.items():
        refusals = _place(context, members, nodes, pods)
        if isinstance(group, tuple):
            _hold_together(context, group, members, pods, refusals)
        for pod in members:
            _tell(context, pod, refusals.get(uid_of(pod)))
            context.store.touch(pod)


def _hold_together(
    context: Context,
    gang: Gang,
    members: list[Object],
    pods: list[Object],
    refusals: dict[str, str],
) -> None:
    """Take the nodes of a gang away again, unless enough of its pods have one."""
    lacking = _lacking(context, gang, pods, refusals)
    if lacking is None:
        return
    for pod in members:
        pod["spec"].pop("nodeName", None)
        refusal = refusals.get(uid_of(pod), "")
        refusals[uid_of(pod)] = f"{lacking}; {refusal}".removesuffix("; ")


def _place(
    context: Context, members: list[Object], nodes: list[Object], pods: list[Object]
) -> dict[str, str]:
    """Give each pod the first node that fits; return why, by uid, for those that none fits."""
    refusals = {}
    for pod in members:
        reasons: Counter[str] = Counter()
        for node in nodes:
            reason = _refusal(context, pod, node, pods)
            if reason is None:
                pod["spec"]["nodeName"] = name_of(node)
                break
            reasons[reason] += 1
        if not pod["spec"].get("nodeName"):
            listed = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
            refusals[uid_of(pod)] = f"0/{len(nodes)} nodes are available: {listed}."
    return refusals


def _refusal(context: Context, pod: Object, node: Object, pods: list[Object]) -> str | None:
    """Return why a pod does not get a node: it does not fit, or a test wants it so."""
    if any(map(context.faults.is_unbound, _claims(pod))):
        return "pod has unbound immediate PersistentVolumeClaims"
    if context.faults.is_unschedulable(f"{namespace_of(pod)}/{name_of(pod)}"):
        return "Insufficient nvidia.com/gpu"
    return _misfit(pod, node, pods)


def _tell(context: Context, pod: Object, refusal: str | None) -> None:
    """Say in a condition and an event whether a pod has a node."""
    status = pod["status"]
    if refusal is None:
        set_condition(status, "PodScheduled")
        full_name = f"{namespace_of(pod)}/{name_of(pod)}"
        message = f"Successfully assigned {full_name} to {pod['spec']['nodeName']}"
        context.store.event(pod, "Normal", "Scheduled", message)
    elif set_condition(status, "PodScheduled", "False", "Unschedulable", refusal):
        context.store.event(pod, "Warning", "FailedScheduling", refusal)


def make_group(context: Context, owner: Object, spec: Object) -> None:
    """Make the PodGroup of a job's pods, as its operator does, unless it exists."""
    if context.store.get("PodGroup", namespace_of(owner), name_of(owner)) is None:
        context.create(owner, "PodGroup", {"name": name_of(owner)}, spec)


def into_group(template: Object, name: str) -> None:
    """Put the pods of a template into a group, by the mark that Volcano looks for."""
    template.setdefault("metadata", {}).setdefault("annotations", {})[_GROUP_NAME] = name


def _group(pod: Object) -> Gang | None:
    """Return namespace and name of the PodGroup that a pod of Volcano's belongs to."""
    name = (pod["metadata"].get("annotations") or {}).get(_GROUP_NAME)
    if not name or pod["spec"].get("schedulerName") != VOLCANO:
        return None
    return namespace_of(pod), name


def _lacking(
    context: Context, gang: Gang, pods: list[Object], refusals: dict[str, str]
) -> str | None:
    """Return what keeps a gang from starting, with its pods placed as far as they fit; None where all is well."""
    namespace, name = gang
    group = context.store.get("PodGroup", namespace, name)
    if group is None:
        return f"pod group {namespace}/{name} is not found"
    least = group["spec"].get("minMember", 1)
    members = 0
    placed = 0
    for pod in pods:
        if _group(pod) == gang and not finished(pod) and not terminating(pod):
            members += 1
            placed += bool(pod["spec"].get("nodeName"))
    if placed >= least:
        return None
    return f"pod group is not ready, {members} of {least} pods are there, {len(refusals)} fit on no node"


def _claims(pod: Object) -> list[str]:
    """Return `namespace/name` of the claims that a pod mounts."""
    claims = []
    for volume in pod["spec"].get("volumes", []):
        source = volume.get("persistentVolumeClaim")
        if source:
            claims.append(f"{namespace_of(pod)}/{source['claimName']}")
    return claims


def _misfit(pod: Object, node: Object, pods: list[Object]) -> str | None:
    """Return why a pod cannot run on a node, in the scheduler's words; None when it can."""
    if node["spec"].get("unschedulable"):
        return "node(s) were unschedulable"
    wanted = pod["spec"].get("nodeSelector") or {}
    if LABELS.items() <= labels_of(node).items() and not LABELS.items() <= wanted.items():
        return "node(s) had untolerated taint {kwok.x-k8s.io/node: fake}"
    if not wanted.items() <= labels_of(node).items():
        return "node(s) didn't match Pod's node affinity/selector"
    neighbours = []
    for other in pods:
        if other["spec"].get("nodeName") == name_of(node) and not finished(other):
            neighbours.append(other)
    if _is_unwanted_beside(pod, neighbours):
        return "node(s) didn't match pod anti-affinity rules"
    # An extended resource that the node does not name is one that it has none of.
    allocatable = node["status"]["allocatable"]
    for resource in sorted({*allocatable, *_extended_resources(pod)}):
        total = sum(requested(other, resource) for other in [*neighbours, pod])
        if total > quantity(allocatable.get(resource, 0)):
            return f"Insufficient {resource}"
    return None


def _is_unwanted_beside(pod: Object, neighbours: list[Object]) -> bool:
    """True if a pod must not be where one of these is."""
    anti = (pod["spec"].get("affinity") or {}).get("podAntiAffinity") or {}
    for term in anti.get("requiredDuringSchedulingIgnoredDuringExecution", []):
        unwanted = (term.get("labelSelector") or {}).get("matchLabels", {})
        for other in neighbours:
            is_meant = unwanted.items() <= labels_of(other).items()
            if is_meant and namespace_of(other) == namespace_of(pod):
                return True
    return False


def requested(pod: Object, resource: str) -> float:
    """Return how much of a resource a pod reserves; a limit counts where no request is given."""
    total = 0.0
    for container in pod["spec"]["containers"]:
        resources = container.get("resources", {})
        amounts = {**resources.get("limits", {}), **resources.get("requests", {})}
        total += quantity(amounts.get(resource, 0))
    return total


def _extended_resources(pod: Object) -> set[str]:
    """Return resources such as `nvidia.com/gpu`, of which a node may have none."""
    names = set()
    for container in pod["spec"]["containers"]:
        for name in container.get("resources", {}).get("limits", {}):
            if "/" in name:
                names.add(name)
    return names
