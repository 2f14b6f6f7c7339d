"""Configuration for kustomize of a rendered folder, so that overlays can rename what is in it.

kustomize knows where the kinds of Kubernetes itself refer to other objects. With a `namePrefix`, a `nameSuffix` or a
generated Secret (whose name ends in a hash) a JobSet would go on naming a ServiceAccount that is not there. The label
by which everything of a run finds the rest is its name too: two overlays of one run in a namespace are two runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kubetune.k8s.manifests.kinds.gang import GROUP_NAME
from kubetune.k8s.manifests.kinds.registry import kinds_by_object
from kubetune.k8s.manifests.spec import INSTANCE, Manifest

CONFIGURATION = "kustomizeconfig.yaml"

_OTHERS = ("Service", "PodGroup", "TrainingRuntime")
_CONTAINERS = ("containers", "initContainers")
# Of a pod template, by the kind of what is referred to.
_REFERENCES: dict[str, tuple[str, ...]] = {
    "ServiceAccount": ("spec/serviceAccountName",),
    "ConfigMap": (
        "spec/volumes/configMap/name",
        *(f"spec/{each}/env/valueFrom/configMapKeyRef/name" for each in _CONTAINERS),
        *(f"spec/{each}/envFrom/configMapRef/name" for each in _CONTAINERS),
    ),
    "Secret": (
        "spec/volumes/secret/secretName",
        "spec/imagePullSecrets/name",
        *(f"spec/{each}/env/valueFrom/secretKeyRef/name" for each in _CONTAINERS),
        *(f"spec/{each}/envFrom/secretRef/name" for each in _CONTAINERS),
    ),
    "PersistentVolumeClaim": ("spec/volumes/persistentVolumeClaim/claimName",),
}


def _key(name: str) -> str:
    """A label's or an annotation's key as one part of a path."""
    return name.replace("/", "\\/")


_GROUPS = (f"metadata/annotations/{_key(GROUP_NAME)}",)
_TERMS = tuple(
    f"spec/affinity/{which}/{how}/labelSelector/matchLabels"
    for which in ("podAffinity", "podAntiAffinity")
    for how in (
        "requiredDuringSchedulingIgnoredDuringExecution",
        "preferredDuringSchedulingIgnoredDuringExecution/podAffinityTerm",
    )
)
# Where a pod template, or an object, has labels and selectors of labels.
_LABELS = (
    "metadata/labels",
    *_TERMS,
    "spec/topologySpreadConstraints/labelSelector/matchLabels",
    "spec/volumes/ephemeral/volumeClaimTemplate/metadata/labels",
)
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
    return () if workload is None else workload.template_paths.get(kind, ())


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
    """The transformers' configuration of a folder with these objects: which fields hold the name of another."""
    kinds = sorted({obj["kind"] for obj in objects})
    found = {
        name: [
            *(
                {"kind": kind, "path": path}
                for kind in kinds
                if _is_custom(kind)
                for path in _in_pods(kind, paths)
            ),
            *({"kind": kind, "path": path} for kind, path in _more(name, kinds)),
        ]
        for name, paths in _REFERENCES.items()
    }
    found |= {
        name: [{"kind": kind, "path": path} for kind, path in _more(name, kinds)]
        for name in _OTHERS
    }
    return {
        "nameReference": [
            {"kind": name, "fieldSpecs": specs} for name, specs in found.items() if specs
        ]
    }


def _more(name: str, kinds: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Fields of these kinds, besides those of pods, that hold the name of an object of the kind `name`."""
    if name == "ConfigMap":
        yield from _instances(kinds)
    elif name == "Service" and "Job" in kinds:
        yield "Job", "spec/template/spec/subdomain"
    elif name == "TrainingRuntime" and "TrainJob" in kinds:
        yield "TrainJob", "spec/runtimeRef/name"
    elif name == "PodGroup" and "PodGroup" in kinds:
        yield from ((kind, path) for kind in kinds for path in _in_pods(kind, _GROUPS))


def _instances(kinds: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Labels that say which run something belongs to: by the name of its ConfigMap, which every run has."""
    for kind in kinds:
        for folder in dict.fromkeys(
            ("metadata/labels", *_label_paths(kind), *_in_pods(kind, _LABELS))
        ):
            yield kind, f"{folder}/{_key(INSTANCE)}"


def _in_pods(kind: str, paths: Sequence[str]) -> Iterator[str]:
    places = template_paths(kind)
    return (f"{place}/{path}" if place else path for path in paths for place in places)
