"""PyTorchJob (kubeflow.org/v1) of Kubeflow's training operator, which is in maintenance: for clusters that have it.

The operator makes the Services and sets the variables of the rendezvous. Its `ExitCode` policy starts pods with codes
of 128 and above again, which is why ours are what they are.
"""

from __future__ import annotations

from kubetune.k8s.manifests.kinds.gang import operator_policy, pod_group
from kubetune.k8s.manifests.spec import TRAINER, Manifest, RunSpec
from kubetune.k8s.manifests.trainer import pod_template

# The operator's webhook refuses a job without a container of this name.
CONTAINER = "pytorch"


def workload(spec: RunSpec) -> list[Manifest]:
    """PodGroup where there is one, and PyTorchJob.

    Node 0 is its master, the others are workers: pods `NAME-master-0`, `NAME-worker-INDEX`.
    """
    k = spec.kubernetes
    template = pod_template(spec, name=CONTAINER, restart_policy=None)
    policy: Manifest = {
        # A run that failed for good must not go on holding GPUs; ended pods stay for their logs.
        "cleanPodPolicy": "Running",
        "backoffLimit": k.max_restarts * spec.nodes,
        **operator_policy(spec, template),
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
        "kubeflow.org/v1", "PyTorchJob", spec.name, TRAINER, more_labels=labels, spec=body
    )
    return [*pod_group(spec, template), job]
