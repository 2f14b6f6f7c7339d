"""The pod templates of objects of any kind, and how many pods are made of each. Not for making them (pod.py)."""

from __future__ import annotations

from collections.abc import Iterator

from kubetune.k8s.manifests.kinds.kind import PodTemplate
from kubetune.k8s.manifests.kinds.registry import kinds_by_object
from kubetune.k8s.manifests.run_spec import Manifest, kind_and_name


def sized_templates(obj: Manifest) -> list[PodTemplate]:
    """Return the pod templates of an object; a Pod is its own template."""
    if obj["kind"] == "Pod":
        return [PodTemplate(kind_and_name(obj), obj, 1)]
    if obj["kind"] == "Deployment":
        pods = int(obj["spec"].get("replicas", 1))
        return [PodTemplate(kind_and_name(obj), obj["spec"]["template"], pods)]

    # Kinds of workloads know their own. Other objects, such as Services, make no pods.
    kind = kinds_by_object().get(obj["kind"])
    if kind is None:
        return []
    return kind.templates(obj)


def pod_templates(obj: Manifest) -> Iterator[tuple[str, Manifest]]:
    """Yield the pod templates of an object, each with its name in messages."""
    for entry in sized_templates(obj):
        yield entry.title, entry.template


def pods_of(obj: Manifest) -> list[int]:
    """Return the number of pods that an object makes of each of its templates."""
    return [entry.pods for entry in sized_templates(obj)]
