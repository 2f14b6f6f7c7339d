"""TrainJob of Kubeflow Trainer 2.2 and later, with a TrainingRuntime of its own.

The runtime carries the pod template, since a TrainJob cannot set a failure policy, probes or the trainer's volumes.
The operator makes a JobSet of it and sets the five PET_* variables of the rendezvous. What is fetched and prepared
before training are its initializers. A TrainJob cannot remove what has ended, but its JobSet removes itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from kubetune.config.data_files import is_hub_id
from kubetune.k8s.lint.finding import Finding, error
from kubetune.k8s.manifests.initialisers import preparing_job, steps
from kubetune.k8s.manifests.kinds.gang import VOLCANO, gang
from kubetune.k8s.manifests.kinds.jobset import jobset_spec, one_job, replicated_templates
from kubetune.k8s.manifests.kinds.kind import PodTemplate, Resource, WorkloadKind
from kubetune.k8s.manifests.spec import (
    TRAINER,
    Manifest,
    RunSpec,
    given,
    kind_and_name,
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
        uris = [f"hf://{path}" for path in named[name] if is_hub_id(path)]
        found["dataset" if name == "data" else name] = (
            {"storageUri": uris[0]} if len(uris) == 1 else {}
        )
    return given(initializer=found)


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
        template = pod_template(spec, name=self.container)
        if gang(spec) == "volcano":
            # The operator puts pods into the group, and names no scheduler.
            template["spec"].setdefault("schedulerName", VOLCANO)
        runtime = {
            "mlPolicy": {"numNodes": spec.nodes, "torch": {}},
            **_group_policy(spec),
            "template": {
                **_queue_annotations(spec),
                "spec": jobset_spec(spec, template, initializers(spec), {ANCESTOR: "trainer"}),
            },
        }
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
        framework = {"trainer.kubeflow.org/framework": "torch"}
        return [
            spec.manifest(
                _RUNTIME.api_version,
                _RUNTIME.name,
                spec.name,
                TRAINER,
                more_labels=framework,
                spec=runtime,
            ),
            spec.manifest(
                self.resource.api_version,
                self.name,
                spec.name,
                TRAINER,
                more_labels=spec.queue_labels(),
                spec=job,
            ),
        ]

    def templates(self, obj: Manifest) -> list[PodTemplate]:
        """Return the templates of the runtime; the TrainJob has none."""
        if obj["kind"] != _RUNTIME.name:
            return []
        templates = replicated_templates(kind_and_name(obj), obj["spec"]["template"]["spec"])
        nodes = int(obj["spec"].get("mlPolicy", {}).get("numNodes", 1))
        # Initializers come one after the other, and are gone before the nodes begin.
        before = [template._replace(pods=0) for template in templates[:-1]]
        return [*before, templates[-1]._replace(pods=nodes)]

    def completions(self, workload: Manifest) -> list[int]:
        """Return the number of nodes, which the TrainJob says."""
        if workload["kind"] == _RUNTIME.name:
            return []
        return [int((workload["spec"].get("trainer") or {}).get("numNodes", 0))]

    def longest_name(self, spec: RunSpec) -> int:
        """Return less with initialisers: pods are then called NAME-dataset-initializer-0-0-xxxxx."""
        return 33 if spec.prepares else super().longest_name(spec)

    def findings(self, spec: RunSpec) -> Iterator[Finding]:
        """Yield that Volcano would never start initializers."""
        if gang(spec) == "volcano" and spec.prepares:
            yield error(
                "kubernetes.scheduling.gang",
                "volcano: the Trainer counts initializers among the pods that have to start together, but the others "
                "begin only after them, so none would ever start; use kind jobset, or leave initialisers and "
                "preprocess out",
            )


def _group_policy(spec: RunSpec) -> Manifest:
    """Return the part of the runtime's spec that has the Trainer make a PodGroup."""
    return {"podGroupPolicy": {"volcano": {}}} if gang(spec) == "volcano" else {}


def _queue_annotations(spec: RunSpec) -> Manifest:
    """Return the annotations of the runtime's template by which the Trainer knows Volcano's queue."""
    queue = spec.kubernetes.scheduling.queue
    if not queue or gang(spec) != "volcano":
        return {}
    return {"metadata": {"annotations": {VOLCANO_QUEUE: queue}}}


KIND = TrainJob()
