"""Sync waves: the order in which Argo CD applies the objects of a run. It waits until those of a wave are healthy.

    wave -1   accounts, roles, policies, ConfigMaps: pods need them to be made at all, or to be reached; what the
              workload refers to, without which a webhook refuses it
    wave  0   the Job that prepares, and the claims that its pod mounts
    wave  1   all else

A Job is healthy once it has ended well, so training begins when the data are prepared. A claim whose class waits for a
pod is not healthy before it has one, so claims go with the first pods, never earlier.
"""

from __future__ import annotations

from collections.abc import Sequence

from kubetune.k8s.manifests.initialisers import PREPROCESS
from kubetune.k8s.manifests.kinds.registry import KINDS, kind_of
from kubetune.k8s.manifests.run_spec import COMPONENT, Manifest

WAVE = "argocd.argoproj.io/sync-wave"
FIRST = ("ServiceAccount", "Role", "RoleBinding", "NetworkPolicy", "ConfigMap")


def in_waves(objects: Sequence[Manifest]) -> list[Manifest]:
    """Return the objects, each with its wave. A wave that the user set by an annotation stays."""
    # Without a preparing Job nothing is in wave 0, and claims go with the first pods, those of wave 1.
    prepares = any(obj["kind"] == "Job" and _is_preparation(obj) for obj in objects)
    result = []
    for obj in objects:
        metadata = obj["metadata"]
        wave = str(_wave(obj, prepares=prepares))
        # The user's annotation comes second, so it wins.
        annotations = {WAVE: wave, **metadata.get("annotations", {})}
        result.append({**obj, "metadata": {**metadata, "annotations": annotations}})
    return result


def _wave(obj: Manifest, *, prepares: bool) -> int:
    if obj["kind"] in FIRST or obj["kind"] in _referred_kinds():
        return -1
    if _is_preparation(obj) or (prepares and obj["kind"] == "PersistentVolumeClaim"):
        return 0
    return 1


def _referred_kinds() -> list[str]:
    """Return the kinds of objects to which workloads refer."""
    return [other.name for name in KINDS for other in kind_of(name).others]


def _is_preparation(obj: Manifest) -> bool:
    return bool(obj["metadata"]["labels"][COMPONENT] == PREPROCESS)
