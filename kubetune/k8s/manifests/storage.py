"""Volumes: the claims that are made, and what a pod mounts where.

A cache belongs to one pod: a block volume can be attached to one node only, so one claim for four pods on four nodes
would leave three of them pending for ever.
"""

from __future__ import annotations

from kubetune.config.schema.cluster import CsiConfig, MountConfig, VolumeConfig, quantity_bytes
from kubetune.k8s.manifests.spec import Manifest, RunSpec
from kubetune.k8s.run_names import CACHE, CONFIG_FOLDER, DATA_FOLDER, OUTPUTS


def shm_size(spec: RunSpec) -> str:
    """Size of /dev/shm; a container gets 64 MiB of its own accord, on which NCCL and data workers die with SIGBUS."""
    if spec.kubernetes.shm_size:
        return spec.kubernetes.shm_size
    memory = spec.config.compute.memory
    return f"{max(1, quantity_bytes(memory) // 4 // 1024**2)}Mi" if memory else "1Gi"


def outputs_access(spec: RunSpec) -> str:
    """Access mode of the outputs claim: shared as soon as more than one pod may want it."""
    k = spec.kubernetes
    several = spec.nodes > 1 or k.tensorboard or k.ui or k.jupyter is not None or spec.prepares
    return k.storage.outputs.access or ("ReadWriteMany" if several else "ReadWriteOnce")


def cache_is_per_pod(spec: RunSpec) -> bool:
    """A cache of which each pod gets a claim of its own."""
    cache = spec.kubernetes.storage.cache
    return cache.size is not None and cache.access != "ReadWriteMany"


def cache_is_jobsets(spec: RunSpec) -> bool:
    """A cache that the JobSet makes for all its pods together, and takes along when it goes."""
    k = spec.kubernetes
    return (
        k.jobset.cache_with_run and not cache_is_per_pod(spec) and k.storage.cache.size is not None
    )


def shared_cache_spec(spec: RunSpec) -> Manifest:
    """The spec of the one cache claim of all pods."""
    return claim_spec(spec.kubernetes.storage.cache, "ReadWriteMany")


def claim_spec(volume: VolumeConfig, access: str) -> Manifest:
    """The spec of a claim for a volume with a size."""
    spec: Manifest = {"accessModes": [access], "resources": {"requests": {"storage": volume.size}}}
    return {**spec, "storageClassName": volume.storage_class} if volume.storage_class else spec


def cache_claim_spec(spec: RunSpec) -> Manifest:
    """The spec of one pod's cache claim."""
    cache = spec.kubernetes.storage.cache
    return claim_spec(cache, cache.access or "ReadWriteOnce")


def claims(spec: RunSpec) -> list[Manifest]:
    """PersistentVolumeClaims that outlive the pods."""
    storage = spec.kubernetes.storage
    wanted: dict[str, Manifest] = {}
    if storage.cache.size and not cache_is_per_pod(spec) and not cache_is_jobsets(spec):
        wanted["cache"] = shared_cache_spec(spec)
    if storage.outputs.size:
        wanted["outputs"] = claim_spec(storage.outputs, outputs_access(spec))
    return [
        spec.manifest("v1", "PersistentVolumeClaim", f"{spec.name}-{name}", "storage", spec=body)
        for name, body in wanted.items()
    ]


def _csi(csi: CsiConfig, *, read_only: bool) -> Manifest:
    volume: Manifest = {"driver": csi.driver, "readOnly": read_only}
    if csi.fs_type:
        volume["fsType"] = csi.fs_type
    if csi.attributes:
        volume["volumeAttributes"] = dict(csi.attributes)
    if csi.secret:
        volume["nodePublishSecretRef"] = {"name": csi.secret}
    return {"csi": volume}


def _existing(volume: VolumeConfig | MountConfig, *, read_only: bool) -> Manifest:
    """The source of a volume that somebody else made."""
    if volume.claim:
        return {
            "persistentVolumeClaim": {
                "claimName": volume.claim,
                **({"readOnly": True} if read_only else {}),
            }
        }
    if volume.host_path:
        return {
            "hostPath": {
                "path": volume.host_path,
                "type": "Directory" if read_only else "DirectoryOrCreate",
            }
        }
    if volume.csi:
        return _csi(volume.csi, read_only=read_only)
    if isinstance(volume, MountConfig) and volume.config_map:
        return {"configMap": {"name": volume.config_map}}
    if isinstance(volume, MountConfig) and volume.secret:
        return {"secret": {"secretName": volume.secret}}
    raise AssertionError("the config's validators see to it that a volume has a source")


def _cache(spec: RunSpec) -> Manifest:
    cache = spec.kubernetes.storage.cache
    if cache_is_per_pod(spec):
        template = {"metadata": {"labels": spec.labels("storage")}, "spec": cache_claim_spec(spec)}
        return {"name": "cache", "ephemeral": {"volumeClaimTemplate": template}}
    if cache.size:
        # A JobSet names its claims itself.
        name = f"cache-{spec.name}" if cache_is_jobsets(spec) else f"{spec.name}-cache"
        return {"name": "cache", "persistentVolumeClaim": {"claimName": name}}
    return {"name": "cache", **_existing(cache, read_only=False)}


def outputs_volume(spec: RunSpec) -> Manifest:
    """The volume that holds the run directories."""
    outputs = spec.kubernetes.storage.outputs
    if outputs.size:
        return {"name": "outputs", "persistentVolumeClaim": {"claimName": f"{spec.name}-outputs"}}
    return {"name": "outputs", **_existing(outputs, read_only=False)}


def _mount_name(index: int) -> str:
    return f"mount-{index}"


def volumes(spec: RunSpec, *, cache_from_template: bool = False) -> list[Manifest]:
    """The volumes of a pod that works on the run; a StatefulSet makes its cache claims from its own template."""
    k = spec.kubernetes
    found: list[Manifest] = [
        {"name": "config", "configMap": {"name": spec.name}},
        *([{"name": "data", "configMap": {"name": f"{spec.name}-data"}}] if spec.files else []),
        outputs_volume(spec),
        *([] if cache_from_template and cache_is_per_pod(spec) else [_cache(spec)]),
        {"name": "tmp", "emptyDir": {}},
        {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": shm_size(spec)}},
    ]
    found += [
        {"name": _mount_name(i), **_existing(mount, read_only=mount.read_only)}
        for i, mount in enumerate(k.mounts)
    ]
    if k.profile == "rdma" and k.rdma.privileged:
        found.append(
            {"name": "infiniband", "hostPath": {"path": "/dev/infiniband", "type": "Directory"}}
        )
    return found


def volume_mounts(spec: RunSpec) -> list[Manifest]:
    """Mounts of the volumes in a container of the run."""
    k = spec.kubernetes
    found: list[Manifest] = [
        {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        *([{"name": "data", "mountPath": DATA_FOLDER, "readOnly": True}] if spec.files else []),
        {"name": "outputs", "mountPath": OUTPUTS},
        {"name": "cache", "mountPath": CACHE},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "dshm", "mountPath": "/dev/shm"},
    ]
    for i, mount in enumerate(k.mounts):
        entry: Manifest = {"name": _mount_name(i), "mountPath": mount.path}
        if mount.read_only:
            entry["readOnly"] = True
        if mount.sub_path:
            entry["subPath"] = mount.sub_path
        found.append(entry)
    if k.profile == "rdma" and k.rdma.privileged:
        found.append({"name": "infiniband", "mountPath": "/dev/infiniband"})
    return found
