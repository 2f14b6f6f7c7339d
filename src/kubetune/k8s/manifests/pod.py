"""Fields of every pod of a run, whatever it does: identity, security, image, and where it may be scheduled.

The restricted pod security standard holds unless the `rdma` profile says otherwise: no root, no privileges, a read-only
root file system, and no token of the API server, which training has no use for.
"""

from __future__ import annotations

from typing import Any

from kubetune.k8s.manifests.run_spec import TRAINER, Manifest, RunSpec, non_empty
from kubetune.k8s.run_names import OUTPUTS

PREFERRED_TOPOLOGY = "kueue.x-k8s.io/podset-preferred-topology"
# An autoscaler that moves one pod to save a node stops all pods, and the work since the last checkpoint is lost.
UNDISTURBED = {
    "karpenter.sh/do-not-disrupt": "true",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
}


def restricted() -> Manifest:
    """Return a container's security context under the restricted standard."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def pod_security(spec: RunSpec) -> Manifest:
    """Return the pod's security context: no root, and the run's group owns new volumes, so that it can write them."""
    user = spec.kubernetes.run_as_user
    return {
        "runAsNonRoot": user != 0,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        # Without this, kubelet changes the owner of every file of a big shared volume at each start.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container(
    spec: RunSpec, name: str, command: list[str], *, security: Manifest | None = None, **more: Any
) -> Manifest:
    """Return a container of the run's image, or another; `more` holds its other fields (env, ports, mounts …)."""
    image = more.pop("image", None) or spec.kubernetes.image
    more["resources"] = limited(spec, more.get("resources") or {})
    return {
        "name": name,
        "image": image,
        **non_empty(imagePullPolicy=spec.kubernetes.image_pull_policy),
        "command": command,
        # Relative paths of the config, such as ./mlruns, then lie on the outputs volume.
        "workingDir": OUTPUTS,
        **non_empty(**more),
        "securityContext": security or restricted(),
    }


def limited(spec: RunSpec, resources: Manifest) -> Manifest:
    """Return resources with what the config wants for every container: CPU limits, and disk of the node."""
    k = spec.kubernetes
    requests = dict(resources.get("requests", {}))
    limits = dict(resources.get("limits", {}))
    if k.cpu_limits and "cpu" in requests:
        limits["cpu"] = requests["cpu"]
    if k.ephemeral_storage:
        requests["ephemeral-storage"] = k.ephemeral_storage
        limits["ephemeral-storage"] = k.ephemeral_storage
    return {**resources, **non_empty(requests=requests, limits=limits)}


def node_affinity(spec: RunSpec) -> Manifest:
    """Return conditions on nodes: one term of all that must hold, and one for each preference."""
    required = []
    preferred = []
    for condition in spec.kubernetes.node_affinity:
        expression: Manifest = {"key": condition.key, "operator": condition.operator}
        if condition.values:
            expression["values"] = list(condition.values)
        if condition.weight is None:
            required.append(expression)
        else:
            preference = {"matchExpressions": [expression]}
            preferred.append({"weight": condition.weight, "preference": preference})
    affinity: Manifest = {}
    if required:
        terms = [{"matchExpressions": required}]
        affinity["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": terms}
    if preferred:
        affinity["preferredDuringSchedulingIgnoredDuringExecution"] = preferred
    return non_empty(nodeAffinity=affinity)


def cpu_resources(cpu: str | int, memory: str) -> Manifest:
    """Return requests and limits of a container without GPUs. A CPU limit would throttle, not protect."""
    return {"requests": {"cpu": str(cpu), "memory": memory}, "limits": {"memory": memory}}


def tolerations(spec: RunSpec, *, gpus: int) -> list[Manifest]:
    """Return the user's tolerations, and with GPUs that of the taint that GPU nodes usually have."""
    usual = {"key": spec.kubernetes.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
    entries = [usual] if gpus else []
    for toleration in spec.kubernetes.tolerations:
        entry = toleration.model_dump(exclude_none=True)
        if entry != usual:
            entries.append(entry)
    return entries


def pod_basics(spec: RunSpec, *, gpus: int = 0) -> Manifest:
    """Return the fields that every pod of a run has."""
    k = spec.kubernetes
    optional = {
        "runtimeClassName": k.runtime_class,
        "imagePullSecrets": [{"name": name} for name in k.image_pull_secrets],
        "priorityClassName": k.priority_class,
        "schedulerName": k.scheduler,
        "nodeSelector": dict(k.node_selector),
        "affinity": node_affinity(spec),
        "tolerations": tolerations(spec, gpus=gpus),
    }
    if spec.gpus and not gpus:
        # A pod without GPUs does not take the run's place on GPU nodes.
        for field in ("runtimeClassName", "nodeSelector", "affinity"):
            del optional[field]
    return {
        "serviceAccountName": spec.service_account,
        "automountServiceAccountToken": False,
        # Variables for every Service of the namespace are thousands in a busy one, and can collide with ours.
        "enableServiceLinks": False,
        "securityContext": pod_security(spec),
        **non_empty(**optional),
    }


def topology(spec: RunSpec) -> dict[str, str]:
    """Return annotations by which Kueue places the trainer's pods near each other. It reads them with a queue only."""
    k = spec.kubernetes
    wanted = k.scheduling.topology
    if not k.queue:
        return {}
    if wanted is None:
        return {PREFERRED_TOPOLOGY: k.pack} if k.pack else {}
    levels = {
        "kueue.x-k8s.io/podset-required-topology": wanted.required,
        PREFERRED_TOPOLOGY: wanted.preferred,
        "kueue.x-k8s.io/podset-slice-required-topology": wanted.slice,
        "kueue.x-k8s.io/podset-slice-size": wanted.slice_nodes,
    }
    return {key: str(level) for key, level in non_empty(**levels).items()}


def pod_metadata(spec: RunSpec, component: str) -> Manifest:
    """Return labels and annotations of a pod template."""
    annotations = dict(spec.kubernetes.annotations)
    if component == TRAINER:
        annotations = {**UNDISTURBED, **annotations, **topology(spec)}
    return {"labels": spec.labels(component), **non_empty(annotations=annotations)}
