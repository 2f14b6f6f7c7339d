"""Gang scheduling: all pods of a run are placed together or none is, so that no node waits with GPUs for one that never
comes.

Kueue needs nothing of ours: it lets a workload go only when there is room for all of it. Volcano knows groups of pods by
an object called PodGroup. For a Job, a JobSet and a StatefulSet that object is made here; the operators of TrainJobs and
PyTorchJobs make it themselves when they are told so (their files).
"""

from __future__ import annotations

import re

from kubetune.k8s.manifests.spec import TRAINER, Manifest, RunSpec, given

GROUP_NAME = "scheduling.k8s.io/group-name"
"""Annotation of pods that names their PodGroup."""

VOLCANO = "volcano"
"""Name of the scheduler, as its own installation calls it."""

POD_GROUP = "scheduling.volcano.sh/v1beta1"


def gang(spec: RunSpec) -> str:
    """Return what starts all pods of the run together: kueue, volcano or none."""
    k = spec.kubernetes
    if k.scheduling.gang != "auto":
        return k.scheduling.gang
    if k.queue:
        return "kueue"
    return "volcano" if k.scheduler == VOLCANO else "none"


def times(quantity: str, count: int) -> str:
    """Return so many times a quantity, such as `500m` or `1.5Gi`, in the unit it is given in."""
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", quantity)
    assert match is not None, "the config's patterns see to it"
    number, unit = match.groups()
    if "." in number:
        return f"{float(number) * count:g}{unit}"
    return f"{int(number) * count}{unit}"


def min_resources(spec: RunSpec, template: Manifest) -> Manifest:
    """Return the resources that all pods of this template request together."""
    requests = template["spec"]["containers"][0].get("resources", {}).get("requests", {})
    return {name: times(str(amount), spec.nodes) for name, amount in requests.items()}


def pod_group(spec: RunSpec, template: Manifest) -> list[Manifest]:
    """Return the PodGroup of a run whose pods have this template, where we make it."""
    if gang(spec) != "volcano":
        return []
    k = spec.kubernetes
    optional = given(
        minResources=min_resources(spec, template),
        queue=k.scheduling.queue,
        priorityClassName=k.priority_class,
    )
    body = {"minMember": spec.nodes, **optional}
    return [spec.manifest(POD_GROUP, "PodGroup", spec.name, TRAINER, spec=body)]


def join(spec: RunSpec, template: Manifest) -> Manifest:
    """Return the trainer's pod template as a member of the run's group, with the scheduler that knows such groups."""
    if gang(spec) == "volcano":
        template["spec"].setdefault("schedulerName", VOLCANO)
        metadata = template["metadata"]
        metadata["annotations"] = {**metadata.get("annotations", {}), GROUP_NAME: spec.name}
    return template
