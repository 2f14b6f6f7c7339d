"""Volumes: the claims that are made, and what a pod mounts where.

A cache belongs to one pod: a block volume can be attached to one node only, so one claim for four pods on four nodes
would leave three of them pending for ever.
"""

from __future__ import annotations

from kubetune.base.registry.address import Address
from kubetune.config.schema.quantities import quantity_bytes
from kubetune.config.schema.volumes import MountConfig, VolumeConfig
from kubetune.k8s.manifests.run_spec import Manifest, RunSpec, non_empty
from kubetune.k8s.run_names import CACHE, CONFIG_FOLDER, DATA_FOLDER, DOCKER_FOLDER, OUTPUTS


def shm_size(spec: RunSpec) -> str:
    """Return the size of /dev/shm: the config's, or a quarter of the memory."""
    if spec.kubernetes.shm_size:
        return spec.kubernetes.shm_size

    # Left out, a container gets 64 MiB, on which NCCL and data workers die with SIGBUS.
    memory = spec.compute.memory
    if not memory:
        return "1Gi"

    # Example: 64Gi of memory makes 16384Mi.
    mebibytes = quantity_bytes(memory) // 4 // 1024**2
    return f"{max(1, mebibytes)}Mi"


def outputs_access(spec: RunSpec) -> str:
    """Return the access mode of the outputs claim: shared as soon as more than one pod may mount it."""
    k = spec.kubernetes
    if k.storage.outputs.access:
        return k.storage.outputs.access

    # Extras and the preparing Job may run on other nodes than the trainer's pod.
    has_other_pods = k.tensorboard or k.ui or k.jupyter is not None or spec.prepares or k.samplers
    if spec.nodes > 1 or has_other_pods:
        return "ReadWriteMany"
    return "ReadWriteOnce"


def cache_is_per_pod(spec: RunSpec) -> bool:
    """True if each pod gets a cache claim of its own."""
    cache = spec.kubernetes.storage.cache
    return cache.size is not None and cache.access != "ReadWriteMany"


def cache_is_jobsets(spec: RunSpec) -> bool:
    """True if the JobSet makes one cache claim for all its pods, and deletes it with itself."""
    k = spec.kubernetes
    is_shared = k.storage.cache.size is not None and not cache_is_per_pod(spec)
    return k.jobset.cache_with_run and is_shared


def jobsets_cache(spec: RunSpec) -> str:
    """Return the name of that claim, which the JobSet chooses."""
    return f"cache-{spec.name}"


def shared_cache_spec(spec: RunSpec) -> Manifest:
    """Return the spec of the one cache claim of all pods."""
    return claim_spec(spec.kubernetes.storage.cache, "ReadWriteMany")


def claim_spec(volume: VolumeConfig, access: str) -> Manifest:
    """Return the spec of a claim for a volume with a size."""
    return {
        "accessModes": [access],
        "resources": {"requests": {"storage": volume.size}},
        **non_empty(storageClassName=volume.storage_class),
    }


def cache_claim_spec(spec: RunSpec) -> Manifest:
    """Return the spec of one pod's cache claim."""
    cache = spec.kubernetes.storage.cache
    return claim_spec(cache, cache.access or "ReadWriteOnce")


def claims(spec: RunSpec) -> list[Manifest]:
    """Return PersistentVolumeClaims that outlive the pods."""
    storage = spec.kubernetes.storage

    # A pod's own claims are templates of the pods, and the JobSet's one is part of the JobSet.
    manifests = []
    if storage.cache.size and not cache_is_per_pod(spec) and not cache_is_jobsets(spec):
        manifests.append(_claim(spec, "cache", shared_cache_spec(spec)))

    if storage.outputs.size:
        outputs = claim_spec(storage.outputs, outputs_access(spec))
        manifests.append(_claim(spec, "outputs", outputs))
    return manifests


def _claim(spec: RunSpec, volume: str, body: Manifest) -> Manifest:
    """Return the claim of a volume."""
    name = f"{spec.name}-{volume}"
    return spec.manifest("v1", "PersistentVolumeClaim", name, "storage", spec=body)


def _existing(volume: VolumeConfig | MountConfig, *, read_only: bool) -> Manifest:
    """Return the source of a volume that somebody else made."""
    if volume.claim:
        # A read-write mount leaves the key out, as the API server's own default does.
        claim = {"claimName": volume.claim, **non_empty(readOnly=read_only)}
        return {"persistentVolumeClaim": claim}

    if volume.host_path:
        # What is only read has to be there already: an empty folder would hide a mistyped path.
        kind = "Directory" if read_only else "DirectoryOrCreate"
        return {"hostPath": {"path": volume.host_path, "type": kind}}

    if volume.csi:
        csi = volume.csi
        optional = non_empty(fsType=csi.fs_type, volumeAttributes=dict(csi.attributes))
        if csi.secret:
            optional["nodePublishSecretRef"] = {"name": csi.secret}
        return {"csi": {"driver": csi.driver, "readOnly": read_only, **optional}}

    # Caches and outputs have no other kinds: pods could not write into these.
    assert isinstance(volume, MountConfig), "the config's validators see to it"
    if volume.config_map:
        return {"configMap": {"name": volume.config_map}}
    return {"secret": {"secretName": volume.secret}}


def _cache(spec: RunSpec) -> Manifest:
    """Return the volume that holds downloads and prepared data."""
    cache = spec.kubernetes.storage.cache
    if cache_is_per_pod(spec):
        # Kubernetes makes the claim with the pod, and deletes it with the pod.
        template = {
            "metadata": {"labels": spec.labels("storage")},
            "spec": cache_claim_spec(spec),
        }
        return {"name": "cache", "ephemeral": {"volumeClaimTemplate": template}}

    if cache.size:
        name = f"{spec.name}-cache"
        if cache_is_jobsets(spec):
            name = jobsets_cache(spec)
        return {"name": "cache", "persistentVolumeClaim": {"claimName": name}}

    # Without a size, the volume exists already.
    return {"name": "cache", **_existing(cache, read_only=False)}


def outputs_volume(spec: RunSpec) -> Manifest:
    """Return the volume that holds the run directories."""
    outputs = spec.kubernetes.storage.outputs
    if outputs.size:
        claim = {"claimName": f"{spec.name}-outputs"}
        return {"name": "outputs", "persistentVolumeClaim": claim}
    return {"name": "outputs", **_existing(outputs, read_only=False)}


def image_volume(name: str, image: Address) -> Manifest:
    """Return a volume that is an image of a registry, read-only. Its secrets are the pod's."""
    return {"name": name, "image": {"reference": image.image}}


def login_secret(spec: RunSpec) -> str | None:
    """Return the Secret by which pods log in to the registry of the base model; None where they need none."""
    secrets = spec.kubernetes.image_pull_secrets
    if spec.base_image is None or spec.mounted_base or not secrets:
        return None
    return secrets[0]


def login_volume(secret: str) -> Manifest:
    """Return the volume with docker's config of a Secret for images."""
    items = [{"key": ".dockerconfigjson", "path": "config.json"}]
    return {"name": "docker", "secret": {"secretName": secret, "items": items}}


def login_mount() -> Manifest:
    """Return the mount of that volume in a container."""
    return {"name": "docker", "mountPath": DOCKER_FOLDER, "readOnly": True}


def volumes(spec: RunSpec, *, cache_from_template: bool = False) -> list[Manifest]:
    """Return the volumes of a pod of the run. With `cache_from_template` a StatefulSet makes the cache claims."""
    k = spec.kubernetes
    # Their order is that of `volume_mounts`, so that both read alike.
    entries: list[Manifest] = [{"name": "config", "configMap": {"name": spec.name}}]
    if spec.files:
        entries.append({"name": "data", "configMap": {"name": f"{spec.name}-data"}})
    entries.append(outputs_volume(spec))
    if not (cache_from_template and cache_is_per_pod(spec)):
        entries.append(_cache(spec))

    image = spec.base_image
    if image is not None and spec.mounted_base:
        entries.append(image_volume("base", image))
    secret = login_secret(spec)
    if secret is not None:
        entries.append(login_volume(secret))

    # The image's own file system is read-only.
    entries.append({"name": "tmp", "emptyDir": {}})
    memory = {"medium": "Memory", "sizeLimit": shm_size(spec)}
    entries.append({"name": "dshm", "emptyDir": memory})
    for index, mount in enumerate(k.mounts):
        source = _existing(mount, read_only=mount.read_only)
        entries.append({"name": f"mount-{index}", **source})
    if k.profile == "rdma" and k.rdma.privileged:
        devices = {"path": "/dev/infiniband", "type": "Directory"}
        entries.append({"name": "infiniband", "hostPath": devices})
    return entries


def volume_mounts(spec: RunSpec) -> list[Manifest]:
    """Return the mounts of these volumes in a container."""
    k = spec.kubernetes
    entries: list[Manifest] = [{"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True}]
    if spec.files:
        entries.append({"name": "data", "mountPath": DATA_FOLDER, "readOnly": True})
    entries.append({"name": "outputs", "mountPath": OUTPUTS})
    entries.append({"name": "cache", "mountPath": CACHE})
    if spec.mounted_base:
        entries.append({"name": "base", "mountPath": spec.mounted_base, "readOnly": True})
    if login_secret(spec) is not None:
        entries.append(login_mount())
    entries.append({"name": "tmp", "mountPath": "/tmp"})
    entries.append({"name": "dshm", "mountPath": "/dev/shm"})
    for index, mount in enumerate(k.mounts):
        optional = non_empty(readOnly=mount.read_only, subPath=mount.sub_path)
        entries.append({"name": f"mount-{index}", "mountPath": mount.path, **optional})
    if k.profile == "rdma" and k.rdma.privileged:
        entries.append({"name": "infiniband", "mountPath": "/dev/infiniband"})
    return entries
