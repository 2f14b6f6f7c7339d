"""TrainJob of Kubeflow Trainer 2.2 and later, with a TrainingRuntime of its own.

The runtime carries the pod template, since a TrainJob cannot set a failure policy, probes or the trainer's volumes.
The operator makes a JobSet of it and sets the five PET_* variables of the rendezvous. What is fetched and prepared
before training are its initializers. A TrainJob cannot remove what has ended, but its JobSet removes itself.

    kubetune                    TrainJob and runtime            the operator makes
    initialisers: [model]   →   replicatedJob model-initializer   JobSet: Job NAME-model-initializer-0
    trainer                 →   replicatedJob node                        Job NAME-node-0, after it
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from kubetune.config.data_files import is_hub_id
from kubetune.k8s.manifests.initialisers import preparing_job, steps
from kubetune.k8s.manifests.kinds.gang_scheduling import VOLCANO, gang
from kubetune.k8s.manifests.kinds.jobset import jobset_spec, replicated_job, replicated_templates
from kubetune.k8s.manifests.kinds.kind import PodTemplate, Resource, WorkloadKind
from kubetune.k8s.manifests.mistakes import Mistake, error
from kubetune.k8s.manifests.run_spec import (
    TRAINER,
    Manifest,
    RunSpec,
    kind_and_name,
    non_empty,
    source_paths,
)
from kubetune.k8s.manifests.trainer import pod_template
from kubetune.k8s.run_names import CACHE

_API = "trainer.kubeflow.org/v1alpha1"
_RUNTIME = Resource("TrainingRuntime", _API, "trainingruntimes")
VOLCANO_QUEUE = "scheduling.volcano.sh/queue-name"
# The operator finds the trainer's Job by this label.
ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
INITIALIZERS = {"model": "model-initializer", "data": "dataset-initializer"}
# Without a mount of this name in an initializer the operator's webhook refuses the TrainJob.
VOLUME = "initializer"


def initializers(spec: RunSpec) -> list[Manifest]:
    """Return the Jobs before the trainer's, under the names by which the operator knows them."""
    shared = "cache" if spec.shared == CACHE else "outputs"
    jobs = []
    for step, command in steps(spec).items():
        name = INITIALIZERS[step]
        job = preparing_job(spec, {name: command})
        pod = job["template"]["spec"]
        for entry in (*pod["volumes"], *pod["containers"][0]["volumeMounts"]):
            if entry["name"] == shared:
                entry["name"] = VOLUME
        jobs.append(replicated_job(name, job, {ANCESTOR: name}))
    return jobs


def sources(spec: RunSpec) -> Manifest:
    """Return the field `initializer`: what is fetched, for readers of the TrainJob. Our initializers read the config.

    A field holds one address, so several data sets stay unnamed:

        data.train [hub/a]          →  dataset: {storageUri: hf://hub/a}
        data.train [hub/a, hub/b]   →  dataset: {}
    """
    paths = {
        "model": [spec.model.path],
        "data": [path for _, path in source_paths(spec.sources)],
    }
    initializer: Manifest = {}
    for step in steps(spec):
        uris = [f"hf://{path}" for path in paths[step] if is_hub_id(path)]
        name = "dataset" if step == "data" else step
        initializer[name] = {"storageUri": uris[0]} if len(uris) == 1 else {}
    return non_empty(initializer=initializer)


class TrainJob(WorkloadKind):
    """A TrainJob, and the TrainingRuntime that carries what it cannot."""

    resource = Resource("TrainJob", _API, "trainjobs")
    others = (_RUNTIME,)
    install = (
        "install Kubeflow Trainer v2.2 or newer: kubectl apply --server-side -k "
        "'https://github.com/kubeflow/trainer.git/manifests/overlays/manager?ref=v2.3.0'"
    )
    # The operator finds the trainer's container by this name.
    container = "node"
    starts_in_order = True
    is_grouped_by_operator = True
    jobset_keys = frozenset({"restart", "exclusive"})
    template_paths: ClassVar = {
        "TrainingRuntime": ("spec/template/spec/replicatedJobs/template/spec/template",)
    }

    def render(self, spec: RunSpec) -> list[Manifest]:
        """Return TrainingRuntime and TrainJob. Pod names resolve as `NAME-node-0-INDEX.NAME`."""
        job: Manifest = {
            **sources(spec),
            "runtimeRef": {
                "apiGroup": _RUNTIME.group,
                "kind": _RUNTIME.name,
                "name": spec.name,
            },
            # Left out, the number of processes would become the number of CPUs asked for.
            "trainer": {"numNodes": spec.nodes, "numProcPerNode": spec.processes},
        }
        if spec.kubernetes.max_runtime_seconds is not None:
            job["activeDeadlineSeconds"] = spec.kubernetes.max_runtime_seconds
        runtime = spec.manifest(
            _RUNTIME.api_version,
            _RUNTIME.name,
            spec.name,
            TRAINER,
            more_labels={"trainer.kubeflow.org/framework": "torch"},
            spec=self._runtime(spec),
        )
        return [runtime, self.workload(spec, job)]

    def _runtime(self, spec: RunSpec) -> Manifest:
        """Return the spec of the TrainingRuntime."""
        template = pod_template(spec, name=self.container)
        group_policy: Manifest = {}
        jobset: Manifest = {}
        if gang(spec) == "volcano":
            # The operator makes the PodGroup and puts the pods into it, but names no scheduler.
            template["spec"].setdefault("schedulerName", VOLCANO)
            group_policy["podGroupPolicy"] = {"volcano": {}}
            queue = spec.kubernetes.scheduling.queue
            if queue:
                jobset["metadata"] = {"annotations": {VOLCANO_QUEUE: queue}}
        labels = {ANCESTOR: "trainer"}
        jobset["spec"] = jobset_spec(spec, template, initializers(spec), labels)
        return {
            "mlPolicy": {"numNodes": spec.nodes, "torch": {}},
            **group_policy,
            "template": jobset,
        }

    def templates(self, obj: Manifest) -> list[PodTemplate]:
        """Return the templates of the runtime. The TrainJob has none."""
        if obj["kind"] != _RUNTIME.name:
            return []
        templates = replicated_templates(kind_and_name(obj), obj["spec"]["template"]["spec"])
        nodes = int(obj["spec"].get("mlPolicy", {}).get("numNodes", 1))
        # Initializers come one after the other, and are gone before the nodes begin.
        before = [template._replace(pods=0) for template in templates[:-1]]
        return [*before, templates[-1]._replace(pods=nodes)]

    def completions(self, workload: Manifest) -> list[int]:
        """Return the TrainJob's number of nodes."""
        if workload["kind"] == _RUNTIME.name:
            return []
        return [int((workload["spec"].get("trainer") or {}).get("numNodes", 0))]

    def longest_name(self, spec: RunSpec) -> int:
        """Return less with initialisers: pods are then called NAME-dataset-initializer-0-0-xxxxx."""
        return 33 if spec.prepares else super().longest_name(spec)

    def findings(self, spec: RunSpec) -> Iterator[Mistake]:
        """Yield an error for initializers in a group of Volcano, which would never start."""
        if gang(spec) == "volcano" and spec.prepares:
            yield error(
                "kubernetes.scheduling.gang",
                "volcano: the Trainer counts initializers among the pods that have to start together, but the others "
                "begin only after them, so none would ever start; use kind jobset, or leave initialisers and "
                "preprocess out",
            )


KIND = TrainJob()
