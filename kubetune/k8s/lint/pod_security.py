"""Fields by which a pod asks for more than the Pod Security Standard "restricted" allows, as patches may have it do.

The fields are those of https://kubernetes.io/docs/concepts/security/pod-security-standards. Not for what is rendered
without patches: `manifests/pod` makes that to the standard.
"""

from __future__ import annotations

from collections.abc import Iterator

from kubetune.k8s.manifests.spec import Manifest

_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def beyond_restricted(pod: Manifest) -> Iterator[str]:
    """Each field of a pod's spec that the standard forbids, or misses, in words."""
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(field):
            yield f"{field} is true"
    for volume in pod.get("volumes") or ():
        for kind in sorted(volume.keys() - _VOLUMES - {"name"}):
            yield f"volume {volume['name']} is a {kind}"
    for container in (*(pod.get("initContainers") or ()), *pod["containers"]):
        for what in _of_container(container, pod.get("securityContext") or {}):
            yield f"container {container['name']}: {what}"


def _of_container(container: Manifest, pods: Manifest) -> Iterator[str]:
    own = container.get("securityContext") or {}
    both = {**pods, **{key: value for key, value in own.items() if value is not None}}
    capabilities = own.get("capabilities") or {}
    if own.get("privileged"):
        yield "privileged is true"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    if "ALL" not in (capabilities.get("drop") or ()):
        yield "capabilities.drop has no ALL"
    if added := sorted(set(capabilities.get("add") or ()) - {"NET_BIND_SERVICE"}):
        yield f"capabilities.add has {', '.join(added)}"
    if both.get("runAsNonRoot") is not True:
        yield "runAsNonRoot is not true"
    if both.get("runAsUser") == 0:
        yield "runAsUser is 0"
    if (both.get("seccompProfile") or {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "seccompProfile.type is neither RuntimeDefault nor Localhost"
    if both.get("procMount") not in (None, "Default"):
        yield f"procMount is {both['procMount']}"
    if any(port.get("hostPort") for port in container.get("ports") or ()):
        yield "a port has a hostPort"
