"""Gang scheduling: all pods of a run are placed together or none, so that no node with GPUs waits for a pod that never
comes.

Kueue needs nothing of ours: it lets a workload go only when there is room for all of it. Volcano knows groups of pods by
an object called PodGroup. For a Job, a JobSet and a StatefulSet that object is made here. The operators of TrainJobs and
PyTorchJobs make it themselves when a field of theirs asks for it (see their files).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from kubetune.config.schema.quantities import cores, quantity_bytes
from kubetune.k8s.manifests.run_spec import TRAINER, Manifest, RunSpec, non_empty

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


class Members(NamedTuple):
    """The pods of one template that belong to a group."""

    template: Manifest
    pods: int


def total(name: str, amounts: Sequence[tuple[str, int]]) -> str:
    """Return the sum of quantities of a resource, each times a count.

    memory   1.5Gi × 4             6Gi
    memory   64Gi × 1, 512Mi × 2   65Gi in bytes
    cpu      4 × 2, 500m × 2       9000m
    """
    numbers = []
    units = set()
    for quantity, count in amounts:
        match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", quantity)
        assert match is not None, "the config's patterns see to it"
        numbers.append(float(match[1]) * count)
        units.add(match[2])
    if len(units) == 1:
        return f"{sum(numbers):.15g}{units.pop()}"
    if name == "cpu":
        return f"{round(sum(cores(quantity) * 1000 * count for quantity, count in amounts))}m"
    return str(sum(quantity_bytes(quantity) * count for quantity, count in amounts))


def group_size(
    spec: RunSpec, groups: Sequence[Members], member_key: str, priority_key: str
) -> Manifest:
    """Return what Volcano has to find room for before it starts any pod of these.

    PodGroups and PyTorchJobs have other keys for the number of pods and for the priority class. Example: 4 nodes, each
    with 8 GPUs and 1.5Gi of memory:

        {minMember: 4, minResources: {memory: 6Gi, nvidia.com/gpu: 32}}
    """
    k = spec.kubernetes
    amounts: dict[str, list[tuple[str, int]]] = {}
    for group in groups:
        resources = group.template["spec"]["containers"][0].get("resources", {})
        for name, amount in resources.get("requests", {}).items():
            amounts.setdefault(name, []).append((str(amount), group.pods))
    optional = {
        "minResources": {name: total(name, parts) for name, parts in amounts.items()},
        "queue": k.scheduling.queue,
        priority_key: k.priority_class,
    }
    pods = sum(group.pods for group in groups)
    return {member_key: pods, **non_empty(**optional)}


def pod_group(spec: RunSpec, groups: Sequence[Members]) -> list[Manifest]:
    """Return the PodGroup of a run with these pods, where we make it."""
    if gang(spec) != "volcano":
        return []
    body = group_size(spec, groups, "minMember", "priorityClassName")
    return [spec.manifest(POD_GROUP, "PodGroup", spec.name, TRAINER, spec=body)]


def join(spec: RunSpec, template: Manifest) -> Manifest:
    """Make the pods of a template members of the run's group, and return it."""
    if gang(spec) == "volcano":
        # Only Volcano's scheduler knows such groups.
        template["spec"].setdefault("schedulerName", VOLCANO)
        metadata = template["metadata"]
        metadata["annotations"] = {**metadata.get("annotations", {}), GROUP_NAME: spec.name}
    return template
