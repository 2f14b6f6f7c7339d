"""The pod templates of objects of any kind, and how many pods are made of each. Not for making them (pod.py)."""

from __future__ import annotations

from collections.abc import Iterator

from kubetune.k8s.manifests.spec import Manifest, kind_and_name


def pod_templates(obj: Manifest) -> Iterator[tuple[str, Manifest]]:
    """Each pod template of an object with a name for it in messages; a Pod is its own template."""
    spec, title = obj.get("spec") or {}, kind_and_name(obj)
    match obj["kind"]:
        case "Pod":
            yield title, obj
        case "Job" | "StatefulSet" | "Deployment":
            yield title, spec["template"]
        case "JobSet" | "TrainingRuntime":
            jobs = (
                spec["replicatedJobs"]
                if obj["kind"] == "JobSet"
                else spec["template"]["spec"]["replicatedJobs"]
            )
            for job in jobs:
                yield f"{title} {job['name']}", job["template"]["spec"]["template"]
        case "PyTorchJob":
            for role, replica in spec["pytorchReplicaSpecs"].items():
                yield f"{title} {role}", replica["template"]


def pods_of(obj: Manifest) -> list[int]:
    """Number of pods that an object makes of each of its templates."""
    spec = obj.get("spec") or {}
    match obj["kind"]:
        case "Job":
            return [int(spec.get("parallelism", 1))]
        case "StatefulSet" | "Deployment":
            return [int(spec.get("replicas", 1))]
        case "JobSet":
            return [
                j.get("replicas", 1) * j["template"]["spec"].get("parallelism", 1)
                for j in spec["replicatedJobs"]
            ]
        case "TrainingRuntime":
            # Its initializers come one after the other, and are gone before the nodes begin.
            before = len(spec["template"]["spec"]["replicatedJobs"]) - 1
            return [*[0] * before, int(spec.get("mlPolicy", {}).get("numNodes", 1))]
        case "PyTorchJob":
            return [
                int(replica.get("replicas", 1)) for replica in spec["pytorchReplicaSpecs"].values()
            ]
    return [1 for _ in pod_templates(obj)]
