"""Gang scheduling: all pods of a run are placed together or none is, so that no node waits with GPUs for one that never
comes.

Three schedulers know groups of pods by an object called PodGroup, each by one of its own. For a Job, a JobSet and a
StatefulSet that object is made here; the operators of TrainJobs and PyTorchJobs make it themselves when they are told
so; Kubernetes' own is always made here. Kueue needs none: it lets a workload go only when there is room for all of it.
"""

from __future__ import annotations

import re

from kubetune.manifests.spec import TRAINER, Manifest, RunSpec, given

VOLCANO_GROUP = "scheduling.k8s.io/group-name"
VOLCANO_QUEUE = "scheduling.volcano.sh/queue-name"
COSCHEDULING_GROUP = "scheduling.x-k8s.io/pod-group"
# What their own installations call them.
SCHEDULERS = {"volcano": "volcano", "coscheduling": "scheduler-plugins-scheduler"}
POD_GROUPS = {
    "volcano": "scheduling.volcano.sh/v1beta1",
    "coscheduling": "scheduling.x-k8s.io/v1alpha1",
    # Beta since Kubernetes 1.37. A Job's own field `scheduling` is younger, and dropped without a word where it is off.
    "native": "scheduling.k8s.io/v1beta1",
}


def gang(spec: RunSpec) -> str:
    """The scheduler that starts all pods of the run together: kueue, volcano, coscheduling, native or none."""
    k = spec.kubernetes
    if k.scheduling.gang != "auto":
        return k.scheduling.gang
    return "kueue" if k.queue else "volcano" if k.scheduler == SCHEDULERS["volcano"] else "none"


def by_operator(spec: RunSpec) -> bool:
    """A kind whose operator makes the PodGroup and puts the pods into it."""
    return spec.kubernetes.kind in ("trainjob", "pytorchjob") and gang(spec) in SCHEDULERS


def times(quantity: str, count: int) -> str:
    """So many times a quantity, such as `500m` or `1.5Gi`, in the unit it is given in."""
    found = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", quantity)
    assert found is not None, "the config's patterns see to it"
    return (
        f"{float(found[1]) * count:g}{found[2]}"
        if "." in found[1]
        else f"{int(found[1]) * count}{found[2]}"
    )


def min_resources(spec: RunSpec, template: Manifest) -> Manifest:
    """Resources that all pods of this template request together."""
    requests = template["spec"]["containers"][0].get("resources", {}).get("requests", {})
    return {name: times(str(amount), spec.nodes) for name, amount in requests.items()}


def pod_group(spec: RunSpec, template: Manifest) -> list[Manifest]:
    """The PodGroup of a run whose pods have this template, where we make it."""
    k, who = spec.kubernetes, gang(spec)
    if who not in POD_GROUPS or by_operator(spec):
        return []
    body: Manifest = {"minMember": spec.nodes, **given(minResources=min_resources(spec, template))}
    if who == "volcano":
        body |= given(queue=k.scheduling.queue, priorityClassName=k.priority_class)
    elif who == "coscheduling":
        body |= given(scheduleTimeoutSeconds=k.scheduling.timeout_seconds)
    else:
        policy = {"gang": {"minCount": spec.nodes}}
        body = {"schedulingPolicy": policy, **given(priorityClassName=k.priority_class)}
    return [spec.manifest(POD_GROUPS[who], "PodGroup", spec.name, TRAINER, spec=body)]


def join(spec: RunSpec, template: Manifest) -> Manifest:
    """The trainer's pod template as a member of the run's group, with the scheduler that knows such groups.

    An operator puts its pods into the group itself, and the training operator names the scheduler too.
    """
    who, metadata, pod = gang(spec), template["metadata"], template["spec"]
    if who in SCHEDULERS and spec.kubernetes.kind != "pytorchjob":
        pod.setdefault("schedulerName", SCHEDULERS[who])
    if by_operator(spec):
        return template
    if who == "volcano":
        metadata["annotations"] = {**metadata.get("annotations", {}), VOLCANO_GROUP: spec.name}
    elif who == "coscheduling":
        metadata["labels"] = {**metadata["labels"], COSCHEDULING_GROUP: spec.name}
    elif who == "native":
        pod["schedulingGroup"] = {"podGroupName": spec.name}
    return template


def runtime_policy(spec: RunSpec) -> Manifest:
    """The part of a TrainingRuntime's spec that has the Trainer make a PodGroup."""
    who, timeout = gang(spec), spec.kubernetes.scheduling.timeout_seconds
    if who not in SCHEDULERS:
        return {}
    return {
        "podGroupPolicy": {
            who: given(scheduleTimeoutSeconds=timeout if who == "coscheduling" else None)
        }
    }


def runtime_annotations(spec: RunSpec) -> Manifest:
    """Annotations of a TrainingRuntime's template by which the Trainer knows Volcano's queue."""
    queue = spec.kubernetes.scheduling.queue
    return (
        {"metadata": {"annotations": {VOLCANO_QUEUE: queue}}}
        if queue and gang(spec) == "volcano"
        else {}
    )


def operator_policy(spec: RunSpec, template: Manifest) -> Manifest:
    """The part of a PyTorchJob's run policy that its operator makes a PodGroup from."""
    k, who = spec.kubernetes, gang(spec)
    if who not in SCHEDULERS:
        return {}
    policy = {"minAvailable": spec.nodes, **given(minResources=min_resources(spec, template))}
    if who == "volcano":
        policy |= given(queue=k.scheduling.queue, priorityClass=k.priority_class)
    else:
        policy |= given(scheduleTimeoutSeconds=k.scheduling.timeout_seconds)
    return {"schedulingPolicy": policy}
