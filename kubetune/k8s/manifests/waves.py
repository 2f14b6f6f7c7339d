"""Sync waves: in which order Argo CD applies the objects of a run, waiting for those of each wave to be healthy.

A Job is healthy once it has ended well, so that what comes after the one that prepares begins when that is done. A
claim whose class waits for a pod is not healthy before there is one, so claims go with the first pods, never earlier.
"""

from __future__ import annotations

from collections.abc import Sequence

from kubetune.k8s.manifests.initialisers import PREPROCESS
from kubetune.k8s.manifests.spec import COMPONENT, Manifest

WAVE = "argocd.argoproj.io/sync-wave"
# What pods need to be made at all, or to be reached; healthy as soon as it is there.
FIRST = ("ServiceAccount", "Role", "RoleBinding", "NetworkPolicy", "ConfigMap")


def in_waves(objects: Sequence[Manifest]) -> list[Manifest]:
    """The objects, each with its wave; one that an annotation of the user's gives already stays."""
    prepares = any(obj["kind"] == "Job" and _component(obj) == PREPROCESS for obj in objects)
    return [_with_wave(obj, _wave(obj, prepares=prepares)) for obj in objects]


def _wave(obj: Manifest, *, prepares: bool) -> int:
    if obj["kind"] in FIRST:
        return -1
    return (
        0
        if _component(obj) == PREPROCESS or (prepares and obj["kind"] == "PersistentVolumeClaim")
        else 1
    )


def _component(obj: Manifest) -> str:
    return str(obj["metadata"]["labels"][COMPONENT])


def _with_wave(obj: Manifest, wave: int) -> Manifest:
    metadata = obj["metadata"]
    annotations = {WAVE: str(wave), **metadata.get("annotations", {})}
    return {**obj, "metadata": {**metadata, "annotations": annotations}}
