"""TrainJob of Kubeflow Trainer 2.2 and later, with a TrainingRuntime of its own.

The runtime carries the pod template, since a TrainJob cannot set a failure policy, probes or the trainer's volumes.
The operator makes a JobSet of it and sets the five PET_* variables of the rendezvous.
"""

from __future__ import annotations

from kubetune.manifests.jobset import jobset_spec
from kubetune.manifests.spec import TRAINER, Manifest, RunSpec
from kubetune.manifests.trainer import pod_template

API = "trainer.kubeflow.org/v1alpha1"
# The operator finds the Job and the container of the trainer by these names.
CONTAINER = "node"
JOB_LABELS = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def workload(spec: RunSpec) -> list[Manifest]:
    """TrainingRuntime and TrainJob. Pod names resolve as `NAME-node-0-INDEX.NAME`."""
    template = pod_template(spec, name=CONTAINER)
    runtime = {
        "mlPolicy": {"numNodes": spec.nodes, "torch": {}},
        "template": {"spec": jobset_spec(spec, template, job_labels=JOB_LABELS)},
    }
    job: Manifest = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": spec.name},
        # Left out, the number of processes would become the number of CPUs asked for.
        "trainer": {"numNodes": spec.nodes, "numProcPerNode": spec.processes},
    }
    if spec.kubernetes.max_runtime_seconds is not None:
        job["activeDeadlineSeconds"] = spec.kubernetes.max_runtime_seconds
    framework = {"trainer.kubeflow.org/framework": "torch"}
    return [
        spec.manifest(API, "TrainingRuntime", spec.name, TRAINER, more_labels=framework, spec=runtime),
        spec.manifest(API, "TrainJob", spec.name, TRAINER, more_labels=spec.queue_labels(), spec=job),
    ]
