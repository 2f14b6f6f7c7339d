"""Kueue for Jobs of which the namespace has the LocalQueue: suspended until the ClusterQueue has quota for them.

A Workload stands for each and says in its conditions, in Kueue's words, where the Job is. The Job runs while that is
admitted, whatever else suspends it or lets it go. Of Kueue 0.19, with one flavor for a resource; not built are cohorts
and all that preempts among them, admission checks, fair sharing, topologies and partial admission.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from standin.controllers.context import Context
from standin.controllers.scheduler import requested
from standin.state.objects import (
    Object,
    condition,
    labels_of,
    name_of,
    namespace_of,
    quantity,
    set_condition,
    terminating,
    uid_of,
)

_QUEUE = "kueue.x-k8s.io/queue-name"
_PRIORITY = "kueue.x-k8s.io/priority-class"
_BINARY_UNITS = {"Gi": 2**30, "Mi": 2**20, "Ki": 2**10}


@dataclass
class Entry:
    """A Job that has not ended, with its Workload."""

    job: Object
    workload: Object
    wanted: Counter[str]  # resources of all its pods, in thousandths

    @property
    def priority(self) -> int:
        return int(self.workload["spec"]["priority"])

    @property
    def has_quota(self) -> bool:
        return condition(self.workload, "QuotaReserved") is not None

    @property
    def is_evicted(self) -> bool:
        return condition(self.workload, "Evicted") is not None

    def set(self, kind: str, value: str, reason: str, message: str) -> None:
        """Write down a condition of the Workload."""
        set_condition(self.workload["status"], kind, value, reason, message)

    def wait(self, reason: str, message: str) -> None:
        """Write down why the Workload has no quota."""
        self.set("QuotaReserved", "False", reason, message)


def reconcile(context: Context) -> None:
    """Let go what has to go, admit what has room, and start and suspend the Jobs by that."""
    entries = _entries(context)
    for entry in entries:
        _evict_where_not_wanted(context, entry)
        _release(entry)
    waiting: dict[str, list[Entry]] = {}
    for entry in entries:
        if not entry.has_quota and (queue := _open_queue(context, entry)):
            waiting.setdefault(queue, []).append(entry)
    for queue, candidates in waiting.items():
        _admit(context, queue, candidates, entries)
    for entry in entries:
        is_admitted = condition(entry.workload, "Admitted") and not entry.is_evicted
        entry.job["spec"]["suspend"] = not is_admitted
        context.store.touch(entry.job)
        context.store.touch(entry.workload)


def _entries(context: Context) -> list[Entry]:
    """Return the Jobs in queues, each with its Workload, which is made where it is missing."""
    entries = []
    for job in context.store.list("Job"):
        queue = labels_of(job).get(_QUEUE)
        if not queue or terminating(job):
            continue
        workload = next(iter(context.owned(job, "Workload")), None)
        end = condition(job, "Complete") or condition(job, "Failed")
        if end:
            if workload:
                reason = "Succeeded" if end["type"] == "Complete" else "Failed"
                set_condition(workload["status"], "Finished", "True", reason, end["message"])
                context.store.touch(workload)
            continue
        if workload is None and context.store.get("LocalQueue", namespace_of(job), queue):
            workload = _make_workload(context, job, queue)
        if workload:
            workload.setdefault("status", {})
            entries.append(Entry(job, workload, _wanted(workload)))
    return entries


def _make_workload(context: Context, job: Object, queue: str) -> Object | None:
    """Make the Workload of a Job; None where that is refused, or its priority is not there."""
    spec: Object = {"queueName": queue, "active": True, "priority": 0}
    class_name = labels_of(job).get(_PRIORITY)
    if class_name:
        priority = context.store.get("WorkloadPriorityClass", "", class_name)
        if priority is None:
            job["spec"]["suspend"] = True
            context.store.touch(job)
            text = f'WorkloadPriorityClass "{class_name}" not found'
            context.store.event(job, "Warning", "WorkloadPriorityClassNotFound", text)
            return None
        spec["priority"] = priority["value"]
        reference = {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass"}
        spec["priorityClassRef"] = {**reference, "name": class_name}
    template = job["spec"]["template"]
    count = job["spec"].get("parallelism", 1)
    spec["podSets"] = [{"name": "main", "count": count, "template": template}]
    labels = {"kueue.x-k8s.io/job-uid": uid_of(job)}
    return context.create(
        job, "Workload", {"name": f"job-{name_of(job)}-1a2b3", "labels": labels}, spec
    )


def _wanted(workload: Object) -> Counter[str]:
    """Return how much of each resource the pods of a Workload ask for together."""
    (pods,) = workload["spec"]["podSets"]
    amounts: Counter[str] = Counter()
    for container in pods["template"]["spec"]["containers"]:
        resources = container.get("resources", {})
        for resource in {**resources.get("limits", {}), **resources.get("requests", {})}:
            of_pod = requested(pods["template"], resource)
            amounts[resource] = _thousandths(of_pod) * pods["count"]
    return amounts


def _thousandths(amount: float) -> int:
    """Return an amount as a whole number, which sums exactly."""
    return round(amount * 1000)


# -- letting go
def _evict_where_not_wanted(context: Context, entry: Entry) -> None:
    """Evict a Workload that is not to be active, or whose queue is drained."""
    if not entry.workload["spec"].get("active", True):
        _evict(context, entry, "Deactivated", "The workload is deactivated")
    elif entry.has_quota:
        name = entry.workload["spec"]["queueName"]
        queue = context.store.get("LocalQueue", namespace_of(entry.job), name)
        if queue and queue["spec"].get("stopPolicy") == "HoldAndDrain":
            _evict(context, entry, "LocalQueueStopped", "LocalQueue is stopped")


def _evict(context: Context, entry: Entry, reason: str, message: str) -> None:
    """Ask a Workload to go. It has its quota until its Job has no active pods."""
    if not entry.is_evicted:
        entry.set("Evicted", "True", reason, message)
        context.store.event(entry.workload, "Normal", f"EvictedDueTo{reason}", message)


def _release(entry: Entry) -> None:
    """Take its quota from a Workload that was evicted and whose Job has stopped."""
    is_stopped = entry.job["spec"]["suspend"] and not entry.job.get("status", {}).get("active")
    if not (entry.has_quota and entry.is_evicted and is_stopped):
        return
    evicted = condition(entry.workload, "Evicted") or {}
    entry.workload["status"].pop("admission", None)
    entry.wait("Pending", evicted["message"])
    entry.set("Admitted", "False", "NoReservation", "The workload has no reservation")
    requeued = str(evicted["reason"] == "Preempted")
    entry.set("Requeued", requeued, evicted["reason"], evicted["message"])


# -- admission
def _open_queue(context: Context, entry: Entry) -> str | None:
    """Return the ClusterQueue that a Workload waits in; None, with the reason in it, where it cannot be admitted."""
    if not entry.workload["spec"].get("active", True):
        entry.wait("Deactivated", "The workload is deactivated")
        return None
    name = entry.workload["spec"]["queueName"]
    local = context.store.get("LocalQueue", namespace_of(entry.job), name)
    if local is None:
        entry.wait("Inadmissible", f"LocalQueue {name} doesn't exist")
        return None
    if local["spec"].get("stopPolicy", "None") != "None":
        entry.wait("Inadmissible", f"LocalQueue {name} is inactive")
        return None
    name = str(local["spec"]["clusterQueue"])
    queue = context.store.get("ClusterQueue", "", name)
    if queue is None:
        entry.wait("Inadmissible", f"ClusterQueue {name} doesn't exist")
        return None
    if queue["spec"].get("stopPolicy", "None") != "None" or not _has_flavors(context, queue):
        entry.wait("Inadmissible", f"ClusterQueue {name} is inactive")
        return None
    namespace = context.store.get("Namespace", "", namespace_of(entry.job))
    # Left out it fits none; empty it fits all.
    selector = queue["spec"].get("namespaceSelector")
    wanted = (selector or {}).get("matchLabels", {}).items()
    if namespace is None or selector is None or not wanted <= labels_of(namespace).items():
        entry.wait("Inadmissible", "workload namespace doesn't match ClusterQueue selector")
        return None
    return name


def _has_flavors(context: Context, queue: Object) -> bool:
    """True if each ResourceFlavor of a queue is there."""
    return all(
        context.store.get("ResourceFlavor", "", flavor["name"])
        for group in queue["spec"].get("resourceGroups", [])
        for flavor in group["flavors"]
    )


def _admit(context: Context, name: str, waiting: list[Entry], entries: list[Entry]) -> None:
    """Admit those that wait in a ClusterQueue, by priority, then by age. What does not fit lets smaller ones pass."""
    queue = context.store.get("ClusterQueue", "", name)
    assert queue is not None
    flavors: dict[str, str] = {}
    free: Counter[str] = Counter()
    for group in queue["spec"].get("resourceGroups", []):
        flavor = group["flavors"][0]
        for resource in flavor["resources"]:
            flavors[resource["name"]] = flavor["name"]
            free[resource["name"]] = _thousandths(quantity(resource["nominalQuota"]))
    total = Counter(free)
    holders = [one for one in entries if one.has_quota and _queue_of(one) == name]
    for holder in holders:
        free.subtract(holder.wanted)
    for entry in sorted(waiting, key=lambda one: (-one.priority, _made(one))):
        refusal = _refusal(entry, flavors, total, free)
        if refusal:
            policy = queue["spec"].get("preemption", {}).get("withinClusterQueue", "Never")
            count = 0
            if policy == "LowerPriority":
                count = _preempt(context, name, entry, holders, free)
            if count:
                refusal += f". Pending the preemption of {count} workload(s)"
                # What becomes free is for it.
                free.subtract(entry.wanted)
            entry.wait("Pending", f"couldn't assign flavors to pod set main: {refusal}")
            continue
        _reserve(context, name, entry, flavors)
        free.subtract(entry.wanted)


def _made(entry: Entry) -> str:
    return str(entry.workload["metadata"]["creationTimestamp"])


def _queue_of(entry: Entry) -> str:
    """Return the ClusterQueue of a Workload that has quota."""
    return str(entry.workload["status"]["admission"]["clusterQueue"])


def _refusal(entry: Entry, flavors: dict[str, str], total: Counter[str], free: Counter[str]) -> str:
    """Return why a Workload does not fit, in the words of Kueue; empty where it does."""
    reasons = []
    for resource, amount in sorted(entry.wanted.items()):
        if resource not in flavors:
            return f"resource {resource} unavailable in ClusterQueue"
        where = f"for {resource} in flavor {flavors[resource]}"
        if amount > total[resource]:
            reasons.append(
                f"insufficient quota {where}, previously considered podsets requests (0) + current podset request "
                f"({_text(resource, amount)}) > maximum capacity ({_text(resource, total[resource])})"
            )
        elif amount > free[resource]:
            lacking = _text(resource, amount - free[resource])
            reasons.append(f"insufficient unused quota {where}, {lacking} more needed")
    return ", ".join(reasons)


def _text(resource: str, thousandths: int) -> str:
    """Return an amount as Kueue writes it: `300m`, `2`, `3Gi`."""
    whole, rest = divmod(thousandths, 1000)
    if rest:
        return f"{thousandths}m"
    if resource == "memory":
        for unit, size in _BINARY_UNITS.items():
            if whole and whole % size == 0:
                return f"{whole // size}{unit}"
    return str(whole)


def _preempt(
    context: Context, name: str, entry: Entry, holders: list[Entry], free: Counter[str]
) -> int:
    """Evict those of lower priority until there will be room for a Workload; return how many, 0 where it never will."""
    lower = [holder for holder in holders if holder.priority < entry.priority]
    # Those that go already, then the least important, then the youngest.
    lower.sort(key=_made, reverse=True)
    lower.sort(key=lambda holder: (not holder.is_evicted, holder.priority))
    left = Counter(free)
    targets = []
    while lower and not _fits(entry, left):
        target = lower.pop(0)
        left.update(target.wanted)
        targets.append(target)
    if not _fits(entry, left):
        return 0
    message = (
        f"Preempted to accommodate a workload (UID: {uid_of(entry.workload)}, JobUID: {uid_of(entry.job)}) due to "
        f"prioritization in the ClusterQueue; preemptor path: /{name}; preemptee path: /{name}"
    )
    for target in targets:
        if not target.is_evicted:
            target.set("Preempted", "True", "InClusterQueue", message)
            _evict(context, target, "Preempted", message)
    return len(targets)


def _fits(entry: Entry, free: Counter[str]) -> bool:
    return all(amount <= free[resource] for resource, amount in entry.wanted.items())


def _reserve(context: Context, name: str, entry: Entry, flavors: dict[str, str]) -> None:
    """Give a Workload its quota, which also admits it, as there are no admission checks."""
    status = entry.workload["status"]
    (pods,) = entry.workload["spec"]["podSets"]
    usage = {resource: _text(resource, amount) for resource, amount in entry.wanted.items()}
    assigned = {resource: flavors[resource] for resource in usage}
    status["admission"] = {
        "clusterQueue": name,
        "podSetAssignments": [
            {"name": "main", "count": pods["count"], "flavors": assigned, "resourceUsage": usage}
        ],
    }
    entry.set("QuotaReserved", "True", "QuotaReserved", f"Quota reserved in ClusterQueue {name}")
    for kind in ("Evicted", "Preempted"):
        before = condition(entry.workload, kind)
        if before:
            entry.set(kind, "False", "QuotaReserved", f"Previously: {before['message']}")
    entry.set("Admitted", "True", "Admitted", "The workload is admitted")
    text = f"Admitted by ClusterQueue {name}, wait time since reservation was 0s"
    context.store.event(entry.workload, "Normal", "Admitted", text)
