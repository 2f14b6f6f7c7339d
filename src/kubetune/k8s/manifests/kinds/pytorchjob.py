"""PyTorchJob (kubeflow.org/v1) of Kubeflow's training operator, which is in maintenance: for clusters that have it.

The operator makes the Services and sets the variables of the rendezvous. Its `ExitCode` policy starts pods with codes
of 128 and above again, which is why ours are what they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from kubetune.k8s.manifests.initialisers import init_containers
from kubetune.k8s.manifests.kinds.gang_scheduling import VOLCANO, Members, gang, group_size
from kubetune.k8s.manifests.kinds.kind import PodTemplate, Resource, WorkloadKind
from kubetune.k8s.manifests.mistakes import Mistake, advice, error
from kubetune.k8s.manifests.run_spec import TRAINER, Manifest, RunSpec, kind_and_name
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
    counts_restarts = False
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

        if k.queue and k.scheduling.topology and spec.nodes > 1:
            # Without it Kueue would place the workers near each other, but not near the master.
            template["metadata"]["annotations"][PODSET_GROUP] = TRAINER

        policy: Manifest = {
            # A run that failed for good must not go on holding GPUs; ended pods stay for their logs.
            "cleanPodPolicy": "Running",
            # With 0 the first failure is the last. The operator counts restarts of containers alone, and these pods
            # have none: it makes new pods, without a limit.
            "backoffLimit": k.max_restarts * spec.nodes,
        }
        if gang(spec) == "volcano":
            trainers = [Members(template, spec.nodes)]
            policy["schedulingPolicy"] = group_size(spec, trainers, "minAvailable", "priorityClass")
        if k.max_runtime_seconds is not None:
            policy["activeDeadlineSeconds"] = k.max_runtime_seconds
        if k.ttl_seconds is not None:
            policy["ttlSecondsAfterFinished"] = k.ttl_seconds

        # A run on one node has no workers. Empty roles are refused.
        replicas = {}
        for role, pods in (("Master", 1), ("Worker", spec.nodes - 1)):
            if pods:
                replicas[role] = {
                    "replicas": pods,
                    "restartPolicy": "ExitCode",
                    "template": template,
                }
        body: Manifest = {
            "nprocPerNode": str(spec.processes),
            "runPolicy": policy,
            "pytorchReplicaSpecs": replicas,
        }
        return [self.workload(spec, body)]

    def templates(self, obj: Manifest) -> list[PodTemplate]:
        """Return the template of each role."""
        templates = []
        for role, replica in obj["spec"]["pytorchReplicaSpecs"].items():
            title = f"{kind_and_name(obj)} {role}"
            pods = int(replica.get("replicas", 1))
            templates.append(PodTemplate(title, replica["template"], pods))
        return templates

    def findings(self, spec: RunSpec) -> Iterator[Mistake]:
        """Yield what the operator and Kueue do to it."""
        k = spec.kubernetes
        if k.queue:
            yield advice(
                "kubernetes.queue",
                "Kueue 0.19 looks after a PyTorchJob only where its configuration names that kind, else it starts at once; "
                "use jobset or job for queued runs",
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
        """True if its run policy suspends it."""
        return bool((workload["spec"].get("runPolicy") or {}).get("suspend"))

    def suspension(self, nodes: int, *, suspend: bool) -> Manifest:
        """Return the patch of its run policy."""
        return {"spec": {"runPolicy": {"suspend": suspend}}}

    def manager(self, workload: Mapping[str, Any]) -> str | None:
        """Return the controller that its run policy names."""
        manager: str | None = (workload["spec"].get("runPolicy") or {}).get("managedBy")
        return manager

    def node_of(self, pod: Mapping[str, Any]) -> int | None:
        """Return 0 for the master, and 1 more than its index for a worker."""
        labels = pod["metadata"].get("labels") or {}
        if _ROLE not in labels:
            return None
        index = int(labels.get(_ROLE_INDEX, "0"))
        # The master is node 0, so worker 0 is node 1.
        if labels[_ROLE] == "worker":
            return index + 1
        return index


KIND = PyTorchJob()
