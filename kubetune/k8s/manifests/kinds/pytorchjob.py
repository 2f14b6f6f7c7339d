"""PyTorchJob (kubeflow.org/v1) of Kubeflow's training operator, which is in maintenance: for clusters that have it.

The operator makes the Services and sets the variables of the rendezvous. Its `ExitCode` policy starts pods with codes
of 128 and above again, which is why ours are what they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from kubetune.k8s.lint.finding import Finding, advice, error
from kubetune.k8s.manifests.initialisers import init_containers
from kubetune.k8s.manifests.kinds.gang import VOLCANO, gang, min_resources
from kubetune.k8s.manifests.kinds.kind import PodTemplate, Resource, WorkloadKind
from kubetune.k8s.manifests.spec import TRAINER, Manifest, RunSpec, given, kind_and_name
from kubetune.k8s.manifests.trainer import pod_template

PODSET_GROUP = "kueue.x-k8s.io/podset-group-name"
_ROLE = "training.kubeflow.org/replica-type"
_ROLE_INDEX = "training.kubeflow.org/replica-index"


class PyTorchJob(WorkloadKind):
    """A PyTorchJob of a master, which is node 0, and workers."""

    resource = Resource("PyTorchJob", "kubeflow.org/v1", "pytorchjobs")
    install = (
        "install the Kubeflow training operator v1.9: kubectl apply --server-side -k "
        "'https://github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.4'"
    )
    # The operator's webhook refuses a job without a container of this name.
    container = "pytorch"
    is_grouped_by_operator = True
    ended_well = ("Succeeded",)
    failed_pod = re.compile(r"^Pod: [^.\s]+\.(?P<pod>\S+) exited with code (?P<code>\d+)")
    template_paths: ClassVar = {
        "PyTorchJob": (
            "spec/pytorchReplicaSpecs/Master/template",
            "spec/pytorchReplicaSpecs/Worker/template",
        )
    }

    def render(self, spec: RunSpec) -> list[Manifest]:
        """Return the PyTorchJob, whose pods are called `NAME-master-0` and `NAME-worker-INDEX`."""
        k = spec.kubernetes
        template = pod_template(
            spec,
            name=self.container,
            restart_policy=None,
            init_containers=init_containers(spec),
        )
        if spec.kubernetes.queue and spec.kubernetes.scheduling.topology and spec.nodes > 1:
            # Master and workers would each be near each other only.
            template["metadata"]["annotations"][PODSET_GROUP] = TRAINER
        policy: Manifest = {
            # A run that failed for good must not go on holding GPUs; ended pods stay for their logs.
            "cleanPodPolicy": "Running",
            "backoffLimit": k.max_restarts * spec.nodes,
            **_scheduling_policy(spec, template),
        }
        if k.max_runtime_seconds is not None:
            policy["activeDeadlineSeconds"] = k.max_runtime_seconds
        if k.ttl_seconds is not None:
            policy["ttlSecondsAfterFinished"] = k.ttl_seconds
        roles = {"Master": 1, "Worker": spec.nodes - 1}
        body: Manifest = {
            "nprocPerNode": str(spec.processes),
            "runPolicy": policy,
            "pytorchReplicaSpecs": {
                role: {"replicas": replicas, "restartPolicy": "ExitCode", "template": template}
                for role, replicas in roles.items()
                if replicas
            },
        }
        labels = spec.queue_labels()
        job = spec.manifest(
            self.resource.api_version, self.name, spec.name, TRAINER, more_labels=labels, spec=body
        )
        return [job]

    def templates(self, obj: Manifest) -> list[PodTemplate]:
        """Return the template of each role."""
        title = kind_and_name(obj)
        return [
            PodTemplate(f"{title} {role}", replica["template"], int(replica.get("replicas", 1)))
            for role, replica in obj["spec"]["pytorchReplicaSpecs"].items()
        ]

    def findings(self, spec: RunSpec) -> Iterator[Finding]:
        """Yield what the operator and Kueue do to it."""
        k = spec.kubernetes
        if k.queue:
            yield advice(
                "kubernetes.queue",
                "Kueue is dropping PyTorchJob; use jobset or job for queued runs",
            )
        if k.profile == "restricted" and spec.nodes > 1:
            yield advice(
                "kubernetes.kind",
                "the training operator adds an init container without a security context to workers; a namespace that "
                "enforces the restricted standard refuses them unless the operator's template is changed",
            )
        if gang(spec) == "volcano":
            name = k.scheduler or VOLCANO
            yield advice(
                "kubernetes.scheduling.gang",
                f"volcano: the training operator makes PodGroups only with --gang-scheduler-name={name}",
            )
        if k.scheduling.topology and k.scheduling.topology.slice_nodes is not None:
            yield error(
                "kubernetes.scheduling.topology.slice",
                "a PyTorchJob's master and workers are apart for Kueue; use kind jobset",
            )

    def suspends(self, workload: Mapping[str, Any]) -> bool:
        """True if its run policy says so."""
        return bool((workload["spec"].get("runPolicy") or {}).get("suspend"))

    def suspension(self, nodes: int, *, suspend: bool) -> Manifest:
        """Return the change of its run policy."""
        return {"spec": {"runPolicy": {"suspend": suspend}}}

    def manager(self, workload: Mapping[str, Any]) -> str | None:
        """Return who its run policy names."""
        manager: str | None = (workload["spec"].get("runPolicy") or {}).get("managedBy")
        return manager

    def node_of(self, pod: Mapping[str, Any]) -> int | None:
        """Return 0 for the master, and one more than its index for a worker."""
        labels = pod["metadata"].get("labels") or {}
        if _ROLE not in labels:
            return None
        index = int(labels.get(_ROLE_INDEX, "0"))
        return index + 1 if labels[_ROLE] == "worker" else index


def _scheduling_policy(spec: RunSpec, template: Manifest) -> Manifest:
    """Return the part of its run policy that the operator makes a PodGroup from."""
    if gang(spec) != "volcano":
        return {}
    k = spec.kubernetes
    optional = given(
        minResources=min_resources(spec, template),
        queue=k.scheduling.queue,
        priorityClass=k.priority_class,
    )
    return {"schedulingPolicy": {"minAvailable": spec.nodes, **optional}}


KIND = PyTorchJob()
