"""Runs that Kueue holds: it starts again whatever is only suspended, so a run is stopped by its Workload instead."""

from __future__ import annotations

from kubetune.cluster import pods
from kubetune.errors import EnvironmentFault
from kubetune.kube_api.client import Cluster, Object
from kubetune.kube_api.kinds import WORKLOADS_OF_KUEUE


def is_installed(cluster: Cluster) -> bool:
    """There is a Kueue; without one the label of a queue means nothing, and who is suspended stays so."""
    return any(cluster.serves(kind) for kind in WORKLOADS_OF_KUEUE)


def activate(cluster: Cluster, workload: Object, *, active: bool) -> None:
    """Let the queue have a run, or take it away: Kueue then suspends it, and its pods save and go.

    The run's own object says so too, since one that is only held back looks the same. Raises EnvironmentFault where
    Kueue has no Workload of it.
    """
    uid, kind, name = workload["metadata"].get("uid"), workload["kind"], pods.name_of(workload)
    found = _workloads(cluster, uid)
    if not found:
        raise EnvironmentFault(
            f"Kueue has no Workload of {kind} {name} (yet), so that it could not be kept from starting it; try again, "
            f"or look at kubectl get workloads -n {cluster.namespace}. Nothing was changed."
        )
    note = {"metadata": {"annotations": {pods.STOPPED: None if active else "true"}}}
    # A run is never taken for one that waits while it is not in the queue.
    if not active:
        cluster.merge(kind, name, note)
    for version, known in found:
        cluster.merge(version, known, {"spec": {"active": active}})
    if active:
        cluster.merge(kind, name, note)


def _workloads(cluster: Cluster, uid: str | None) -> list[tuple[str, str]]:
    """Version and name of each Workload that belongs to the object of this uid and has not ended."""
    for version in WORKLOADS_OF_KUEUE:
        found = [
            (version, pods.name_of(each))
            for each in cluster.list(version)
            if any(owner.get("uid") == uid for owner in each["metadata"].get("ownerReferences") or [])
            and not pods.condition(each, "Finished")
        ]
        if found:
            return found
    return []
