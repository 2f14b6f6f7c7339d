"""Configuration for kustomize of a rendered folder, so that overlays can rename what is in it.

kustomize knows where the kinds of Kubernetes itself refer to other objects. With a `namePrefix`, a `nameSuffix` or a
generated Secret (whose name ends in a hash) a JobSet would go on naming a ServiceAccount that does not exist. The label
that all objects of a run carry is its name too, so two overlays of a run in a namespace are two runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kubetune.k8s.manifests.kinds.gang_scheduling import GROUP_NAME
from kubetune.k8s.manifests.kinds.registry import kinds_by_object
from kubetune.k8s.manifests.run_spec import INSTANCE, Manifest
from kubetune.k8s.manifests.samplers import GROUP as SAMPLERS

CONFIGURATION = "kustomizeconfig.yaml"

_CONTAINERS = ("containers", "initContainers")


def _key(name: str) -> str:
    """Return a label's or an annotation's key as one part of a path."""
    return name.replace("/", "\\/")


def _in_containers(path: str) -> list[str]:
    return [f"spec/{containers}/{path}" for containers in _CONTAINERS]


# Where a pod template refers to objects of other kinds.
_REFERENCES: dict[str, list[str]] = {
    "ServiceAccount": ["spec/serviceAccountName"],
    "ConfigMap": [
        "spec/volumes/configMap/name",
        *_in_containers("env/valueFrom/configMapKeyRef/name"),
        *_in_containers("envFrom/configMapRef/name"),
    ],
    "Secret": [
        "spec/volumes/secret/secretName",
        "spec/imagePullSecrets/name",
        *_in_containers("env/valueFrom/secretKeyRef/name"),
        *_in_containers("envFrom/secretRef/name"),
    ],
    "PersistentVolumeClaim": ["spec/volumes/persistentVolumeClaim/claimName"],
}
_GROUPS = [f"metadata/annotations/{_key(GROUP_NAME)}"]
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution/labelSelector/matchLabels"
_PREFERRED = (
    "preferredDuringSchedulingIgnoredDuringExecution/podAffinityTerm/labelSelector/matchLabels"
)
# Where a pod template, or an object, has labels and selectors of labels.
_LABELS = [
    "metadata/labels",
    f"spec/affinity/podAffinity/{_REQUIRED}",
    f"spec/affinity/podAffinity/{_PREFERRED}",
    f"spec/affinity/podAntiAffinity/{_REQUIRED}",
    f"spec/affinity/podAntiAffinity/{_PREFERRED}",
    "spec/topologySpreadConstraints/labelSelector/matchLabels",
    "spec/volumes/ephemeral/volumeClaimTemplate/metadata/labels",
]
_SELECTORS: dict[str, tuple[str, ...]] = {
    "Service": ("spec/selector",),
    "NetworkPolicy": ("spec/podSelector/matchLabels", "spec/ingress/from/podSelector/matchLabels"),
    "Deployment": ("spec/selector/matchLabels",),
}


def template_paths(kind: str) -> tuple[str, ...]:
    """Return where objects of a kind keep pod templates; kustomize enters lists by itself."""
    if kind == "Pod":
        return ("",)
    if kind == "Deployment":
        return ("spec/template",)
    workload = kinds_by_object().get(kind)
    if workload is None:
        return ()
    return workload.template_paths.get(kind, ())


def _is_custom(kind: str) -> bool:
    """True if kustomize does not look into the pods of a kind by itself."""
    workload = kinds_by_object().get(kind)
    return workload is not None and workload.install is not None


def _label_paths(kind: str) -> tuple[str, ...]:
    """Return where objects of a kind hold labels and selectors of labels, outside of their pods."""
    workload = kinds_by_object().get(kind)
    if workload is not None and workload.name == kind:
        return workload.label_paths
    return _SELECTORS.get(kind, ())


def configuration(objects: Sequence[Manifest]) -> Manifest:
    """Return the transformers' configuration of a folder with these objects: which fields hold the name of another.

    Example: a JobSet, whose pods kustomize does not know.

        nameReference:
        - kind: ServiceAccount
          fieldSpecs:
          - {kind: JobSet, path: spec/replicatedJobs/template/spec/template/spec/serviceAccountName}
    """
    kinds = sorted({obj["kind"] for obj in objects})
    references = []
    for name in (*_REFERENCES, "Service", "PodGroup", "TrainingRuntime"):
        specs = []
        for kind, path in _fields_with_name(name, kinds):
            specs.append({"kind": kind, "path": path})
        if specs:
            references.append({"kind": name, "fieldSpecs": specs})
    return {"nameReference": references}


def _fields_with_name(name: str, kinds: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield kind and path of the fields of these kinds that hold the name of an object of the kind `name`."""
    # What kustomize knows by itself must not be named again: it would change the name twice.
    for kind in kinds:
        if _is_custom(kind):
            for path in _in_pods(kind, _REFERENCES.get(name, [])):
                yield kind, path

    # Names that are no reference for Kubernetes, but must follow the object all the same.
    if name == "ConfigMap":
        yield from _instances(kinds)
    elif name == "Service" and "Job" in kinds:
        yield "Job", "spec/template/spec/subdomain"
        yield "Job", f"spec/template/metadata/annotations/{_key(SAMPLERS)}"
    elif name == "TrainingRuntime" and "TrainJob" in kinds:
        yield "TrainJob", "spec/runtimeRef/name"
    elif name == "PodGroup" and "PodGroup" in kinds:
        for kind in kinds:
            for path in _in_pods(kind, _GROUPS):
                yield kind, path


def _instances(kinds: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield labels that say which run an object belongs to: by the name of its ConfigMap, which every run has."""
    for kind in kinds:
        mappings = ["metadata/labels", *_label_paths(kind), *_in_pods(kind, _LABELS)]
        for path in dict.fromkeys(mappings):
            yield kind, f"{path}/{_key(INSTANCE)}"


def _in_pods(kind: str, paths: Sequence[str]) -> Iterator[str]:
    """Yield these paths of a pod template as paths of an object of a kind."""
    for path in paths:
        for template in template_paths(kind):
            # A Pod is its own template.
            if template:
                yield f"{template}/{path}"
            else:
                yield path
