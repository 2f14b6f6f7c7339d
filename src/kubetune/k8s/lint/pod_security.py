"""Fields by which a pod asks for more than the Pod Security Standard "restricted" allows. Patches may set them.

The fields are those of https://kubernetes.io/docs/concepts/security/pod-security-standards. Not for what is rendered
without patches: `manifests/pod` makes that to the standard.
"""

from __future__ import annotations

from collections.abc import Iterator

from kubetune.k8s.manifests.run_spec import Manifest

_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def beyond_restricted(pod: Manifest) -> Iterator[str]:
    """Yield each field of a pod's spec that the standard forbids or misses, for messages."""
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(field):
            yield f"{field} is true"
    for volume in pod.get("volumes") or ():
        for kind in sorted(volume.keys() - _VOLUMES - {"name"}):
            yield f"volume {volume['name']} is a {kind}"

    # Init containers are held to the same rules.
    containers = [*(pod.get("initContainers") or ()), *pod["containers"]]
    pod_context = pod.get("securityContext") or {}
    for container in containers:
        for field in _of_container(container, pod_context):
            yield f"container {container['name']}: {field}"


def _of_container(container: Manifest, pod_context: Manifest) -> Iterator[str]:
    context = container.get("securityContext") or {}
    capabilities = context.get("capabilities") or {}

    # Fields that a container leaves out have the pod's value.
    effective = dict(pod_context)
    effective.update((key, value) for key, value in context.items() if value is not None)

    # These exist for containers alone. Left out, escalation is allowed and all capabilities of the runtime are kept.
    if context.get("privileged"):
        yield "privileged is true"
    if context.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    if "ALL" not in (capabilities.get("drop") or ()):
        yield "capabilities.drop has no ALL"
    added = sorted(set(capabilities.get("add") or ()) - {"NET_BIND_SERVICE"})
    if added:
        yield f"capabilities.add has {', '.join(added)}"

    # These may be set for the whole pod.
    if effective.get("runAsNonRoot") is not True:
        yield "runAsNonRoot is not true"
    if effective.get("runAsUser") == 0:
        yield "runAsUser is 0"
    seccomp = effective.get("seccompProfile") or {}
    if seccomp.get("type") not in ("RuntimeDefault", "Localhost"):
        yield "seccompProfile.type is neither RuntimeDefault nor Localhost"

    if effective.get("procMount") not in (None, "Default"):
        yield f"procMount is {effective['procMount']}"
    ports = container.get("ports") or ()
    if any(port.get("hostPort") for port in ports):
        yield "a port has a hostPort"
