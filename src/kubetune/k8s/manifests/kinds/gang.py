"""Gang scheduling: all pods of a run are placed together or none, so that no node with GPUs waits for a pod that never
comes.

Kueue needs nothing of ours: it lets a workload go only when there is room for all of it. Volcano knows groups of pods by
an object called PodGroup. For a Job, a JobSet and a StatefulSet that object is made here. The operators of TrainJobs and
PyTorchJobs make it themselves when a field of theirs asks for it (see their files).
"""

from __future__ import annotations

import re

from kubetune.k8s.manifests.spec import TRAINER, Manifest, RunSpec, non_empty

# Annotation of pods that names their PodGroup.
GROUP_NAME = "scheduling.k8s.io/group-name"
# Name of the scheduler, as Volcano's own installation calls it.
VOLCANO = "volcano"
POD_GROUP = "scheduling.volcano.sh/v1beta1"


def gang(spec: RunSpec) -> str:
    """Return what starts all pods of the run together: kueue, volcano or none."""
    k = spec.kubernetes
    if k.scheduling.gang != "auto":
        return k.scheduling.gang
    if k.queue:
        return "kueue"
    if k.scheduler == VOLCANO:
        return "volcano"
    return "none"


def times(quantity: str, count: int) -> str:
    """Return a quantity such as `500m` or `1.5Gi` multiplied by a count, in the same unit."""
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", quantity)
    assert match is not None, "the config's patterns see to it"
    number, unit = match.groups()
    if "." in number:
        return f"{float(number) * count:g}{unit}"
    return f"{int(number) * count}{unit}"


def group_size(spec: RunSpec, template: Manifest, member_key: str, priority_key: str) -> Manifest:
    """Return what Volcano has to find room for before it starts any pod of this template.

    PodGroups and PyTorchJobs have other keys for the number of pods and for the priority class. Example: 4 nodes, each
    with 8 GPUs and 1.5Gi of memory:

        {minMember: 4, minResources: {memory: 6Gi, nvidia.com/gpu: 32}}
    """
    k = spec.kubernetes
    requests = template["spec"]["containers"][0].get("resources", {}).get("requests", {})
    resources = {name: times(str(amount), spec.nodes) for name, amount in requests.items()}
    optional = {
        "minResources": resources,
        "queue": k.scheduling.queue,
        priority_key: k.priority_class,
    }
    return {member_key: spec.nodes, **non_empty(**optional)}


def pod_group(spec: RunSpec, template: Manifest) -> list[Manifest]:
    """Return the PodGroup of a run whose pods have this template, where we make it."""
    if gang(spec) != "volcano":
        return []
    body = group_size(spec, template, "minMember", "priorityClassName")
    return [spec.manifest(POD_GROUP, "PodGroup", spec.name, TRAINER, spec=body)]


def join(spec: RunSpec, template: Manifest) -> Manifest:
    """Make the pods of a template members of the run's group, and return it."""
    if gang(spec) == "volcano":
        # Only Volcano's scheduler knows such groups.
        template["spec"].setdefault("schedulerName", VOLCANO)
        metadata = template["metadata"]
        metadata["annotations"] = {**metadata.get("annotations", {}), GROUP_NAME: spec.name}
    return template
