"""Fields of every pod of a run, whatever it does: identity, security, image, and where it may be scheduled.

The restricted pod security standard holds unless the `rdma` profile says otherwise: no root, no privileges, read-only
root file system, and no token of the API server, which a training process has no business with.
"""

from __future__ import annotations

from typing import Any

from kubetune.k8s.manifests.spec import TRAINER, Manifest, RunSpec, given
from kubetune.k8s.run_names import OUTPUTS

PREFERRED_TOPOLOGY = "kueue.x-k8s.io/podset-preferred-topology"
# An autoscaler that moves one pod to save a node stops all of them, and each takes up work since the last checkpoint.
UNDISTURBED = {
    "karpenter.sh/do-not-disrupt": "true",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
}


def restricted() -> Manifest:
    """A container's security context under the restricted standard."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def pod_security(spec: RunSpec) -> Manifest:
    """The pod's security context: no root, and new volumes belong to the run's group so that it can write them."""
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
    """A container of the run's image, or another; `more` holds its other fields (env, ports, resources, mounts …)."""
    policy = spec.kubernetes.image_pull_policy
    resources = {"resources": limited(spec, more.get("resources") or {})}
    return {
        "name": name,
        "image": more.pop("image", None) or spec.kubernetes.image,
        **given(imagePullPolicy=policy),
        "command": command,
        # Relative paths of the config, such as ./mlruns, then lie on the outputs volume.
        "workingDir": OUTPUTS,
        **given(**more | resources),
        "securityContext": security or restricted(),
    }


def limited(spec: RunSpec, resources: Manifest) -> Manifest:
    """Requests and limits with those that the config wants on every container: CPU limits, disk of the node."""
    k = spec.kubernetes
    requests, limits = dict(resources.get("requests", {})), dict(resources.get("limits", {}))
    if k.cpu_limits and "cpu" in requests:
        limits["cpu"] = requests["cpu"]
    if k.ephemeral_storage:
        requests["ephemeral-storage"] = limits["ephemeral-storage"] = k.ephemeral_storage
    return {**resources, **given(requests=requests, limits=limits)}


def node_affinity(spec: RunSpec) -> Manifest:
    """Conditions on nodes beyond labels that are equal: one term for all that must be, one for each wish."""
    required, preferred = [], []
    for wanted in spec.kubernetes.node_affinity:
        expression: Manifest = {"key": wanted.key, "operator": wanted.operator}
        if wanted.values:
            expression["values"] = list(wanted.values)
        if wanted.weight is None:
            required.append(expression)
        else:
            preferred.append(
                {"weight": wanted.weight, "preference": {"matchExpressions": [expression]}}
            )
    found: Manifest = {}
    if required:
        terms = {"nodeSelectorTerms": [{"matchExpressions": required}]}
        found["requiredDuringSchedulingIgnoredDuringExecution"] = terms
    if preferred:
        found["preferredDuringSchedulingIgnoredDuringExecution"] = preferred
    return given(nodeAffinity=found)


def cpu_resources(cpu: str | int, memory: str) -> Manifest:
    """Requests and limits of a container without GPUs. No CPU limit: it would throttle, not protect."""
    return {"requests": {"cpu": str(cpu), "memory": memory}, "limits": {"memory": memory}}


def tolerations(spec: RunSpec, *, gpus: int) -> list[Manifest]:
    """The user's, and with GPUs the taint that GPU nodes usually have."""
    own = [t.model_dump(exclude_none=True) for t in spec.kubernetes.tolerations]
    usual = {"key": spec.kubernetes.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
    return [*([usual] if gpus else []), *(t for t in own if t != usual)]


def pod_basics(spec: RunSpec, *, gpus: int = 0) -> Manifest:
    """Pod fields that every pod of a run has."""
    k = spec.kubernetes
    # A pod without GPUs does not take the run's place on GPU nodes.
    is_placed = bool(gpus) or not spec.gpus
    optional = given(
        runtimeClassName=k.runtime_class if is_placed else None,
        imagePullSecrets=[{"name": name} for name in k.image_pull_secrets],
        priorityClassName=k.priority_class,
        schedulerName=k.scheduler,
        nodeSelector=dict(k.node_selector) if is_placed else {},
        affinity=node_affinity(spec) if is_placed else {},
        tolerations=tolerations(spec, gpus=gpus),
    )
    return {
        "serviceAccountName": spec.service_account,
        "automountServiceAccountToken": False,
        # Variables for every Service of the namespace: thousands in a busy one, and they can collide with ours.
        "enableServiceLinks": False,
        "securityContext": pod_security(spec),
        **optional,
    }


def topology(spec: RunSpec) -> dict[str, str]:
    """Annotations by which Kueue places the trainer's pods near each other; without a queue it does not look."""
    k, wanted = spec.kubernetes, spec.kubernetes.scheduling.topology
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
    return {key: str(level) for key, level in levels.items() if level is not None}


def pod_metadata(spec: RunSpec, component: str) -> Manifest:
    """Labels and annotations of a pod template."""
    annotations = dict(spec.kubernetes.annotations)
    if component == TRAINER:
        annotations = {**UNDISTURBED, **annotations}
        annotations |= topology(spec)
    return {"labels": spec.labels(component), **given(annotations=annotations)}
