"""Runs in a queue of Kueue. It starts again what is only suspended, so a run is stopped by its Workload instead.

The Workload also says why a run waits.
"""

from __future__ import annotations

from kubetune.errors import EnvironmentFault
from kubetune.k8s.api.api_errors import ApiError, Refused
from kubetune.k8s.api.client import Cluster, Object
from kubetune.k8s.api.kinds import QUEUES_OF_KUEUE, WORKLOADS_OF_KUEUE
from kubetune.k8s.cluster import pods


def is_installed(cluster: Cluster) -> bool:
    """True if the cluster has Kueue. Without it the label of a queue means nothing, and what is suspended stays so."""
    return any(cluster.serves(kind) for kind in WORKLOADS_OF_KUEUE)


def looks_after(cluster: Cluster, workload: Object) -> bool:
    """True if Kueue has a Workload of it, or holds it back and may make one.

    Kueue 0.19 leaves kinds alone that are not among its integrations, such as the PyTorchJob: they run at once.
    """
    if _workloads(cluster, workload["metadata"].get("uid")):
        return True
    return pods.is_suspended(workload) and pods.is_held_back(workload)


def activate(cluster: Cluster, workload: Object, *, active: bool) -> None:
    """Put a run into its queue, or take it out: Kueue then suspends it, and its pods save and end.

    An annotation of the run's object says so too, since a run that is only held back looks the same. Raises
    EnvironmentFault where Kueue has no Workload of the run.
    """
    kind = workload["kind"]
    name = pods.name_of(workload)
    records = _workloads(cluster, workload["metadata"].get("uid"))
    if not records:
        raise EnvironmentFault(
            f"Kueue has no Workload for {kind} {name} yet, so the run cannot be taken out of its queue; try again, "
            f"or look at kubectl get workloads -n {cluster.namespace}. Nothing was changed."
        )
    note = pods.stopped_note(stopped=not active)
    # The annotation is there for as long as the run is out of the queue, so it never looks like one that waits.
    if not active:
        cluster.merge(kind, name, note)
    for version, record in records:
        cluster.merge(version, pods.name_of(record), {"spec": {"active": active}})
    if active:
        cluster.merge(kind, name, note)


def missing_queue(cluster: Cluster, name: str) -> str:
    """Return the problem that a queue does not exist. Empty where it does, or where the user may not list queues."""
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
        # Users who may not read Workloads see only that the run waits.
        return ""
    if not records:
        return "Kueue has no Workload of it (yet)"
    return _reason_of(records[0][1])


def _reason_of(record: Object) -> str:
    """Return why a Workload is not admitted: taken off its nodes, without quota, or checked still."""
    if pods.condition(record, "Admitted"):
        return ""
    reasons = []
    evicted = pods.condition(record, "Evicted")
    if evicted:
        # Preempted says by whom, where Evicted only says that it was.
        cause = pods.condition(record, "Preempted") or evicted
        reasons.append(f"taken off its nodes ({evicted.get('reason')}): {cause.get('message')}")
    refused = pods.condition(record, "QuotaReserved", "False")
    if refused:
        reasons.append(str(refused.get("message") or refused.get("reason") or ""))
    elif pods.condition(record, "QuotaReserved"):
        # It has quota, and waits for others, such as a node group that is to grow.
        checks = (record.get("status") or {}).get("admissionChecks") or []
        for check in checks:
            if check.get("state") != "Ready":
                text = f"admission check {check.get('name')} is {check.get('state')}"
                reasons.append(": ".join(filter(None, (text, check.get("message")))))
    return "; ".join(filter(None, reasons))


def _workloads(cluster: Cluster, uid: str | None) -> list[tuple[str, Object]]:
    """Return each Workload that belongs to the object of this uid and has not ended, with the version of its kind."""
    # A cluster serves one or both of the versions; the first that has the record is enough.
    for version in WORKLOADS_OF_KUEUE:
        records = []
        for record in cluster.list(version):
            owners = record["metadata"].get("ownerReferences") or []
            is_ours = any(owner.get("uid") == uid for owner in owners)
            if is_ours and not pods.condition(record, "Finished"):
                records.append((version, record))
        if records:
            return records
    return []
