"""The pod template of one training node: the same for every kind but for the container's name and the rendezvous."""

from __future__ import annotations

from collections.abc import Sequence

from kubetune.k8s.manifests.environment import trainer_environment
from kubetune.k8s.manifests.monitoring import container_ports
from kubetune.k8s.manifests.pod import (
    container,
    node_affinity,
    pod_basics,
    pod_metadata,
    restricted,
)
from kubetune.k8s.manifests.spec import MARGIN_SECONDS, PORT, TRAINER, Manifest, RunSpec, given
from kubetune.k8s.manifests.storage import volume_mounts, volumes
from kubetune.k8s.run_names import CONFIG_FILE

HOSTNAME = "kubernetes.io/hostname"

# The kernel throws away a SIGTERM that process 1 does not yet block or handle: while Python starts, which takes long
# from a cold image. Such a pod would stay for its whole grace period, so Kubernetes asks it only once it listens: bit
# 15 of these masks is SIGTERM's.
LISTENS = "until grep -Eq '^Sig(Blk|Cgt):.*[4-7c-f].{3}$' /proc/1/status; do sleep 0.1; done"


def agent_command(spec: RunSpec) -> list[str]:
    """Command of the trainer's container, in every kind: the agent that also starts a run on a laptop."""
    return ["python", "-P", "-m", "kubetune.agent", spec.run_dir, "--config", CONFIG_FILE]


def resources(spec: RunSpec) -> Manifest:
    """Requests and limits of one node. No CPU limit: it would throttle, not protect."""
    compute, k = spec.config.compute, spec.kubernetes
    requests: dict[str, str] = {"cpu": str(compute.cpu)} if compute.cpu else {}
    exact: dict[str, str] = {}
    if compute.memory:
        exact["memory"] = compute.memory
    if spec.gpus and not any(claim.gpus for claim in k.resource_claims):
        exact[k.gpu_resource] = str(spec.gpus)
    if k.profile == "rdma" and k.rdma.resource:
        exact[k.rdma.resource] = str(k.rdma.devices)
    claims = [
        {"name": claim.name, **({"request": claim.request} if claim.request else {})}
        for claim in k.resource_claims
    ]
    return given(requests={**requests, **exact}, limits=exact, claims=claims)


def resource_claims(spec: RunSpec) -> Manifest:
    """Claims that the pod's devices come from, by the names that its container asks for."""
    found = [
        {"name": claim.name, "resourceClaimTemplateName": claim.template}
        if claim.template
        else {"name": claim.name, "resourceClaimName": claim.claim}
        for claim in spec.kubernetes.resource_claims
    ]
    return given(resourceClaims=found)


def security(spec: RunSpec) -> Manifest:
    """The trainer's security context. RDMA pins memory; without a device plugin, where asked for, it is privileged."""
    if spec.kubernetes.profile == "restricted":
        return restricted()
    if spec.kubernetes.rdma.privileged:
        return {"privileged": True, "readOnlyRootFilesystem": True}
    return {**restricted(), "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}}


def affinity(spec: RunSpec) -> Manifest:
    """Each pod on a machine of its own, and all of them near each other where a node label says what near is."""
    k, selector = spec.kubernetes, {"matchLabels": spec.selector(TRAINER)}
    found: Manifest = {}
    apart = {"topologyKey": HOSTNAME, "labelSelector": selector}
    if k.spread == "required":
        found["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}
    elif k.spread == "preferred":
        weighted = {"weight": 100, "podAffinityTerm": apart}
        found["podAntiAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": [weighted]}
    if k.pack:
        near = {"weight": 50, "podAffinityTerm": {"topologyKey": k.pack, "labelSelector": selector}}
        found["podAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": [near]}
    return found


def placement(spec: RunSpec) -> Manifest:
    """Pod fields that place the pods of several nodes relative to each other; nothing for a single one."""
    if spec.nodes == 1:
        return {}
    apart = {**node_affinity(spec), **affinity(spec)}
    found: Manifest = given(affinity=apart)
    if spec.kubernetes.spread != "none":
        required = spec.kubernetes.spread == "required"
        found["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": HOSTNAME,
                "whenUnsatisfiable": "DoNotSchedule" if required else "ScheduleAnyway",
                "labelSelector": {"matchLabels": spec.selector(TRAINER)},
            }
        ]
    return found


def pod_template(
    spec: RunSpec,
    *,
    name: str = TRAINER,
    rendezvous: list[Manifest] | None = None,
    restart_policy: str | None = "Never",
    subdomain: str | None = None,
    cache_from_template: bool = False,
    init_containers: Sequence[Manifest] = (),
) -> Manifest:
    """The template of one node's pod.

    `name` is the container's, where the operator looks for one; `rendezvous` the variables to set where the operator
    sets none; `restart_policy` None leaves it to the operator; `subdomain` is the headless Service that gives the pods
    their DNS names; with `cache_from_template` the workload makes the cache claims from a template of its own;
    `init_containers` run before the trainer.
    """
    trainer = container(
        spec,
        name,
        agent_command(spec),
        env=trainer_environment(spec, rendezvous or []),
        ports=[
            {"name": "rendezvous", "protocol": "TCP", "containerPort": PORT},
            *container_ports(spec),
        ],
        lifecycle={"preStop": {"exec": {"command": ["sh", "-c", LISTENS]}}},
        resources=resources(spec),
        volumeMounts=volume_mounts(spec),
        security=security(spec),
    )
    pod: Manifest = {
        **given(restartPolicy=restart_policy),
        **given(subdomain=subdomain),
        "terminationGracePeriodSeconds": spec.kubernetes.grace_seconds + MARGIN_SECONDS,
        **pod_basics(spec, gpus=spec.gpus),
        **placement(spec),
        **resource_claims(spec),
        **given(initContainers=list(init_containers)),
        "containers": [trainer],
        "volumes": volumes(spec, cache_from_template=cache_from_template),
    }
    return {"metadata": pod_metadata(spec, TRAINER), "spec": pod}
