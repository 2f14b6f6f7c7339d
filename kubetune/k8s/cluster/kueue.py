"""Runs that Kueue holds: it starts again whatever is only suspended, so a run is stopped by its Workload instead.

The Workload also says why a run waits.
"""

from __future__ import annotations

from kubetune.errors import EnvironmentFault
from kubetune.k8s.api.api_errors import ApiError, Refused
from kubetune.k8s.api.client import Cluster, Object
from kubetune.k8s.api.kinds import QUEUES_OF_KUEUE, WORKLOADS_OF_KUEUE
from kubetune.k8s.cluster import pods


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
        cluster.merge(version, pods.name_of(known), {"spec": {"active": active}})
    if active:
        cluster.merge(kind, name, note)


def missing_queue(cluster: Cluster, name: str) -> str:
    """Return what is wrong with a queue of that name: there is none. Empty where there is, or nobody here may know."""
    for version in QUEUES_OF_KUEUE:
        try:
            if not cluster.serves(version):
                continue
            queues = sorted(pods.name_of(queue) for queue in cluster.list(version))
        except Refused:
            return ""
        if name in queues:
            return ""
        known = ", ".join(queues) or "none"
        return (
            f"kubernetes.queue: there is no LocalQueue {name} in namespace {cluster.namespace}, so Kueue would never "
            f"start the run; queues there: {known}"
        )
    return ""


def why_waiting(cluster: Cluster, workload: Object | None) -> str:
    """Return why Kueue holds a run back, by the conditions of its Workload; empty where that is not known."""
    if workload is None or not pods.is_held_back(workload) or not pods.is_suspended(workload):
        return ""
    try:
        records = _workloads(cluster, workload["metadata"].get("uid"))
    except ApiError:
        return ""  # whoever may not read Workloads sees only that the run waits
    return _reason_of(records[0][1]) if records else "Kueue has no Workload of it (yet)"


def _reason_of(record: Object) -> str:
    """Return why a Workload is not admitted: taken off its nodes, without quota, or checked still."""
    if pods.condition(record, "Admitted"):
        return ""
    reasons = []
    if evicted := pods.condition(record, "Evicted"):
        # Preempted says by whom, where Evicted only says that it was.
        cause = pods.condition(record, "Preempted") or evicted
        reasons.append(f"taken off its nodes ({evicted.get('reason')}): {cause.get('message')}")
    if refused := pods.condition(record, "QuotaReserved", "False"):
        reasons.append(str(refused.get("message") or refused.get("reason") or ""))
    elif pods.condition(record, "QuotaReserved"):
        checks = (record.get("status") or {}).get("admissionChecks") or []
        for check in checks:
            if check.get("state") != "Ready":
                text = f"admission check {check.get('name')} is {check.get('state')}"
                reasons.append(": ".join(filter(None, (text, check.get("message")))))
    return "; ".join(filter(None, reasons))


def _workloads(cluster: Cluster, uid: str | None) -> list[tuple[str, Object]]:
    """Return each Workload that belongs to the object of this uid and has not ended, with the version of its kind."""
    for version in WORKLOADS_OF_KUEUE:
        found = []
        for record in cluster.list(version):
            owners = record["metadata"].get("ownerReferences") or []
            is_ours = any(owner.get("uid") == uid for owner in owners)
            if is_ours and not pods.condition(record, "Finished"):
                found.append((version, record))
        if found:
            return found
    return []
