"""TrainJob of Kubeflow Trainer 2.2 and later, with a TrainingRuntime of its own.

The runtime carries the pod template, since a TrainJob cannot set a failure policy, probes or the trainer's volumes.
The operator makes a JobSet of it and sets the five PET_* variables of the rendezvous. What is fetched and prepared
before training are its initializers. A TrainJob cannot remove what has ended, but its JobSet removes itself.
"""

from __future__ import annotations

from kubetune.k8s.manifests.initialisers import preparing_job, steps
from kubetune.k8s.manifests.kinds.gang import pod_group, runtime_annotations, runtime_policy
from kubetune.k8s.manifests.kinds.jobset import jobset_spec, one_job
from kubetune.k8s.manifests.spec import TRAINER, Manifest, RunSpec, given, on_hub, source_paths
from kubetune.k8s.manifests.trainer import pod_template
from kubetune.k8s.run_names import CACHE

API = "trainer.kubeflow.org/v1alpha1"
# The operator finds the Job and the container of the trainer by these names.
CONTAINER = "node"
ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
INITIALIZERS = {"model": "model-initializer", "data": "dataset-initializer"}
# Without a mount of this name in an initializer the operator's webhook refuses the TrainJob.
VOLUME = "initializer"


def initializers(spec: RunSpec) -> list[Manifest]:
    """The Jobs before the trainer's, under the names by which the operator knows them."""
    wanted = {INITIALIZERS[name]: command for name, command in steps(spec).items()}
    found = [(name, preparing_job(spec, {name: command})) for name, command in wanted.items()]
    shared = "cache" if spec.shared == CACHE else "outputs"
    for _, job in found:
        pod = job["template"]["spec"]
        for entry in (*pod["volumes"], *pod["containers"][0]["volumeMounts"]):
            if entry["name"] == shared:
                entry["name"] = VOLUME
    return [one_job(name, job, {ANCESTOR: name}) for name, job in found]


def sources(spec: RunSpec) -> Manifest:
    """The `initializer` field: what the initializers get, for whoever looks at the TrainJob; ours read the config."""
    named = {
        "model": [spec.config.model.path],
        "data": [path for _, path in source_paths(spec.config)],
    }
    found: Manifest = {}
    for name in steps(spec):
        uris = [f"hf://{path}" for path in named[name] if on_hub(path)]
        found["dataset" if name == "data" else name] = (
            {"storageUri": uris[0]} if len(uris) == 1 else {}
        )
    return given(initializer=found)


def workload(spec: RunSpec) -> list[Manifest]:
    """PodGroup where there is one, TrainingRuntime and TrainJob. Pod names resolve as `NAME-node-0-INDEX.NAME`."""
    template = pod_template(spec, name=CONTAINER)
    runtime = {
        "mlPolicy": {"numNodes": spec.nodes, "torch": {}},
        **runtime_policy(spec),
        "template": {
            **runtime_annotations(spec),
            "spec": jobset_spec(spec, template, initializers(spec), {ANCESTOR: "trainer"}),
        },
    }
    job: Manifest = {
        **sources(spec),
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "TrainingRuntime",
            "name": spec.name,
        },
        # Left out, the number of processes would become the number of CPUs asked for.
        "trainer": {"numNodes": spec.nodes, "numProcPerNode": spec.processes},
    }
    if spec.kubernetes.max_runtime_seconds is not None:
        job["activeDeadlineSeconds"] = spec.kubernetes.max_runtime_seconds
    framework = {"trainer.kubeflow.org/framework": "torch"}
    return [
        *pod_group(spec, template),
        spec.manifest(
            API, "TrainingRuntime", spec.name, TRAINER, more_labels=framework, spec=runtime
        ),
        spec.manifest(
            API, "TrainJob", spec.name, TRAINER, more_labels=spec.queue_labels(), spec=job
        ),
    ]
