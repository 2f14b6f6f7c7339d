"""Hosts that are lost, as by a power failure: their pods stay, and Kubernetes makes none in their place.

It cannot tell a host that is off from one that computes on without a network. Only an administrator can.

    0 s     the host's kubelet says its last word: the containers of the pod are ready
    40 s    the Node is NotReady (Unknown), and so is the pod, whose containers still count as ready
    340 s   the pod is Terminating, and stays so
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kubetune.k8s.api.api_errors import ApiError
from kubetune.k8s.api.client import Cluster, Object
from kubetune.k8s.cluster import pods

# A pod that is still there so long after its grace period has a kubelet that does not answer.
_OVERDUE_SECONDS = 30.0
_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"


@dataclass(frozen=True)
class LostHost:
    """A host whose kubelet does not answer, with a pod of the run that is there."""

    name: str
    since: str  # as of 2026-11-20T10:15:00Z
    pod: str

    def advice(self) -> str:
        """Return what is wrong, and what an administrator can do."""
        return (
            f"host {self.name} is lost since {self.since}, and no pod takes the place of {self.pod} before that is gone. "
            "If the host does not come back, an administrator has to say so: "
            f"kubectl delete node {self.name}, or kubectl taint nodes {self.name} {_OUT_OF_SERVICE}"
        )


def lost_hosts(cluster: Cluster, all_pods: Sequence[Object]) -> list[LostHost]:
    """Return the hosts that pods are not heard of from, each once. Without the right to read nodes, the pods tell."""
    hosts: dict[str, LostHost] = {}
    for pod in all_pods:
        name = pod["spec"].get("nodeName")
        is_ending = pods.phase_of(pod) == "Terminating"
        # Each node is a request.
        if not name or name in hosts or not (is_ending or _is_unheard(pod)):
            continue
        since = _lost_since(cluster, name, pod, is_ending=is_ending)
        if since:
            hosts[name] = LostHost(name, since, pods.name_of(pod))
    return list(hosts.values())


def _is_unheard(pod: Object) -> bool:
    """True if a pod is called not ready by another than its kubelet, whose last word is that its containers are."""
    status = pod.get("status") or {}
    containers = status.get("containerStatuses") or []
    all_ready = bool(containers) and all(container.get("ready") for container in containers)
    # With a gate, the pod waits for whatever opens it.
    is_gated = bool(pod["spec"].get("readinessGates"))
    return all_ready and not is_gated and pods.condition(pod, "Ready", "False") is not None


def _lost_since(cluster: Cluster, name: str, pod: Object, *, is_ending: bool) -> str:
    """Return since when a host is lost; empty where it is not."""
    try:
        node = cluster.get("Node", name)
    except ApiError:
        if not is_ending:
            return _unready_since(pod)
        return _overdue_since(pod)
    # Kubernetes removes the pods of a node that is not there.
    if node is None or pods.condition(node, "Ready") is not None:
        return ""
    values = ["Unknown"]
    if is_ending:
        # Its kubelet answers, and cannot end the pod.
        values.append("False")
    for value in values:
        condition = pods.condition(node, "Ready", value)
        if condition is not None:
            return str(condition.get("lastTransitionTime") or "an unknown time")
    return ""


def _overdue_since(pod: Object) -> str:
    """Return since when a pod is not ready that should have ended by now; empty where it has time left."""
    until = str(pod["metadata"]["deletionTimestamp"])
    if (pods.age_seconds(until) or 0.0) < _OVERDUE_SECONDS:
        return ""
    return _unready_since(pod) or until


def _unready_since(pod: Object) -> str:
    """Return since when a pod is not ready; empty where it does not say so."""
    condition = pods.condition(pod, "Ready", "False") or {}
    return str(condition.get("lastTransitionTime") or "")
