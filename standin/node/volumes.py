"""A pod's volumes, each a folder or a link to one, which containers bind: emptyDir, claims, ConfigMaps, images, hostPath."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from standin.node import runtime
from standin.node.environment import Waiting, project
from standin.node.loopback import translate
from standin.node.pod_state import PodState
from standin.state.objects import Object, claim_name, quantity

_PROJECTED = {"configMap", "secret"}
_DEFAULT_MEMORY_VOLUME = "1Gi"


def set_up_volume(owner: PodState, volume: Object) -> None:
    """Make one volume ready below the pod's folder; Waiting when a claim or a ConfigMap is not there yet."""
    at = owner.folder / "volumes" / volume["name"]
    claim = claim_name(owner.name, volume)
    if claim:
        _link(at, _claim_folder(owner, claim))
    elif "hostPath" in volume:
        _link(at, Path(volume["hostPath"]["path"]))
    elif "image" in volume:
        _link(at, _image_folder(owner, volume["image"]["reference"]))
    elif "emptyDir" in volume:
        at.mkdir(exist_ok=True)
        _empty(at, volume["emptyDir"] or {}, in_memory=not owner.host.settings.loopback)
    else:
        at.mkdir(exist_ok=True)

        def write(path: str, content: bytes, mode: int) -> None:
            _write(at / path, content, mode)

        project(owner.store, owner.pod, volume, write)
    # A folder of the machine is not ours to change, nor is an image.
    if not {"hostPath", "image"} & volume.keys():
        _give_to_pods_group(owner, at.resolve())


def _give_to_pods_group(owner: PodState, folder: Path) -> None:
    """Give a volume to the group that the pod names, if there are other users."""
    context = owner.spec.get("securityContext") or {}
    group = context.get("fsGroup")
    if group is None or owner.host.settings.loopback or runtime.single_user():
        return
    is_lazy = context.get("fsGroupChangePolicy") == "OnRootMismatch"
    if is_lazy and folder.stat().st_gid == group:
        return
    # The root last, so that one that has the group says that all below has it.
    for parent, folders, files in os.walk(folder, topdown=False):
        for name in (*folders, *files, ""):
            # The volume may be in use: files come and go meanwhile.
            with contextlib.suppress(FileNotFoundError):
                _give(Path(parent, name), group)


def tear_down_volumes(folder: Path) -> None:
    """Unmount the memory volumes of a pod."""
    for at in sorted(folder.glob("volumes/*")):
        # A link may lead to what is mounted on this machine.
        if not at.is_symlink() and at.is_mount():
            runtime.unmount(str(at))


def _claim_folder(owner: PodState, claim: str) -> Path:
    """Return the folder of a claim; Waiting if it does not exist, or another node has it."""
    pvc = owner.store.get("PersistentVolumeClaim", owner.namespace, claim)
    if pvc is None:
        raise Waiting("ContainerCreating", f'persistentvolumeclaim "{claim}" not found')
    elsewhere = []
    for other in owner.running():
        has_it = other.namespace == owner.namespace and claim in other.claims
        if has_it and other.spec["nodeName"] != owner.spec["nodeName"]:
            elsewhere.append(other.name)
    if elsewhere and pvc["spec"]["accessModes"] == ["ReadWriteOnce"]:
        message = f'Multi-Attach error for volume "{claim}": volume is already used by pod(s) {", ".join(elsewhere)}'
        raise Waiting("ContainerCreating", message)
    owner.claims.add(claim)
    folder = owner.host.settings.state / "claims" / owner.namespace / claim
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _image_folder(owner: PodState, reference: str) -> Path:
    """Return the folder that stands for an image that is mounted as a volume."""
    folder = owner.host.settings.state / "images" / reference
    if not folder.is_dir():
        message = f'Back-off pulling image "{reference}"'
        raise Waiting("ImagePullBackOff", message)
    return folder


def _link(at: Path, target: Path) -> None:
    if not at.is_symlink():
        at.symlink_to(target)


def translate_files(owner: PodState, folders: Mapping[str, str]) -> None:
    """Let projected files name the folders that stand for mounts; once all volumes are there."""
    for volume in owner.spec.get("volumes", []):
        if _PROJECTED & volume.keys():
            for path in (owner.folder / "volumes" / volume["name"]).iterdir():
                path.write_text(translate(path.read_text(), folders))


def _empty(at: Path, source: Object, *, in_memory: bool) -> None:
    if source.get("medium") == "Memory" and in_memory and not at.is_mount():
        size = int(quantity(source.get("sizeLimit", _DEFAULT_MEMORY_VOLUME)))
        runtime.mount("tmpfs", str(at), "tmpfs", 0, f"mode=1777,size={size}")
    at.chmod(0o1777)


def _write(path: Path, content: bytes, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(mode)


def _give(path: Path, group: int) -> None:
    """Give a file to a group, which may write it; what is made in a folder is the group's, too."""
    status = path.lstat()
    if status.st_gid != group and not path.is_symlink():
        os.chown(path, -1, group)
        path.chmod(status.st_mode | (0o2770 if path.is_dir() else 0o660))
