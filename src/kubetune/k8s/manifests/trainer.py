"""The pod template of one training node. Kinds differ in the container's name and the rendezvous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from kubetune.k8s.manifests.monitoring import container_ports
from kubetune.k8s.manifests.pod import (
    container,
    node_affinity,
    pod_basics,
    pod_metadata,
    restricted,
)
from kubetune.k8s.manifests.pod_environment import trainer_environment
from kubetune.k8s.manifests.run_spec import (
    MARGIN_SECONDS,
    PORT,
    TRAINER,
    Manifest,
    RunSpec,
    non_empty,
)
from kubetune.k8s.manifests.storage import volume_mounts, volumes
from kubetune.k8s.run_names import CONFIG_FILE

HOSTNAME = "kubernetes.io/hostname"

# The kernel throws away a SIGTERM that process 1 does not yet block or handle. So it is while Python starts, which takes
# long from a cold image, and such a pod would stay for its whole grace period. Therefore Kubernetes runs this before it
# sends SIGTERM. Of the masks SigBlk and SigCgt, bit 15 is SIGTERM's: the third of the four bits of the digit before the
# last three, so the digit is one of 4-7 and c-f.
#
#     SigCgt: 0000000180004002    digit 4 = 0100: SIGTERM is handled
LISTENS = "until grep -Eq '^Sig(Blk|Cgt):.*[4-7c-f].{3}$' /proc/1/status; do sleep 0.1; done"


def agent_command(spec: RunSpec) -> list[str]:
    """Return the command of the trainer's container: the agent that also starts a run on a laptop."""
    return ["python", "-P", "-m", "kubetune.agent", spec.run_dir, "--config", CONFIG_FILE]


def resources(spec: RunSpec) -> Manifest:
    """Return requests and limits of one node. A CPU limit would throttle, not protect."""
    compute = spec.compute
    k = spec.kubernetes
    # Kubernetes wants these in requests and limits alike.
    exact: dict[str, str] = {}
    if compute.memory:
        exact["memory"] = compute.memory
    if spec.gpus and not any(claim.gpus for claim in k.resource_claims):
        exact[k.gpu_resource] = str(spec.gpus)
    if k.profile == "rdma" and k.rdma.resource:
        exact[k.rdma.resource] = str(k.rdma.devices)
    requests = dict(exact)
    if compute.cpu:
        requests = {"cpu": str(compute.cpu), **exact}
    claims = [non_empty(name=claim.name, request=claim.request) for claim in k.resource_claims]
    return non_empty(requests=requests, limits=exact, claims=claims)


def resource_claims(spec: RunSpec) -> Manifest:
    """Return the claims of devices, by the names that the container uses."""
    claims = []
    for claim in spec.kubernetes.resource_claims:
        claims.append(
            non_empty(
                name=claim.name,
                resourceClaimTemplateName=claim.template,
                resourceClaimName=claim.claim,
            )
        )
    return non_empty(resourceClaims=claims)


def security(spec: RunSpec) -> Manifest:
    """Return the trainer's security context. RDMA pins memory, and without a device plugin it needs privileges."""
    if spec.kubernetes.profile == "restricted":
        return restricted()
    if spec.kubernetes.rdma.privileged:
        return {"privileged": True, "readOnlyRootFilesystem": True}
    return {**restricted(), "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}}


def affinity(spec: RunSpec) -> Manifest:
    """Return that each pod has a node of its own, and that all are near each other by a label of nodes."""
    k = spec.kubernetes
    selector = {"matchLabels": spec.selector(TRAINER)}
    rules: Manifest = {}
    apart = {"topologyKey": HOSTNAME, "labelSelector": selector}
    match k.spread:
        case "required":
            rules["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}
        case "preferred":
            weighted = {"weight": 100, "podAffinityTerm": apart}
            rules["podAntiAffinity"] = {
                "preferredDuringSchedulingIgnoredDuringExecution": [weighted]
            }
        case "none":
            pass
        case unknown:
            assert_never(unknown)
    if k.pack:
        near = {"topologyKey": k.pack, "labelSelector": selector}
        weighted = {"weight": 50, "podAffinityTerm": near}
        rules["podAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": [weighted]}
    return rules


def placement(spec: RunSpec) -> Manifest:
    """Return pod fields that place the pods of several nodes relative to each other."""
    if spec.nodes == 1:
        return {}
    fields: Manifest = non_empty(affinity={**node_affinity(spec), **affinity(spec)})
    if spec.kubernetes.spread != "none":
        required = spec.kubernetes.spread == "required"
        constraint = {
            "maxSkew": 1,
            "topologyKey": HOSTNAME,
            "whenUnsatisfiable": "DoNotSchedule" if required else "ScheduleAnyway",
            "labelSelector": {"matchLabels": spec.selector(TRAINER)},
        }
        fields["topologySpreadConstraints"] = [constraint]
    return fields


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
    """Return the template of one node's pod.

    `name` is the container's, which some operators look for. `rendezvous` are torchrun's variables where no operator
    sets them. A `restart_policy` of None leaves it to the operator. `subdomain` is the headless Service that gives the
    pods their DNS names. With `cache_from_template` the workload makes the cache claims itself.
    """
    rendezvous_port = {"name": "rendezvous", "protocol": "TCP", "containerPort": PORT}
    trainer = container(
        spec,
        name,
        agent_command(spec),
        env=trainer_environment(spec, rendezvous or []),
        ports=[rendezvous_port, *container_ports(spec)],
        lifecycle={"preStop": {"exec": {"command": ["sh", "-c", LISTENS]}}},
        resources=resources(spec),
        volumeMounts=volume_mounts(spec),
        security=security(spec),
    )
    pod: Manifest = {
        **non_empty(restartPolicy=restart_policy, subdomain=subdomain),
        "terminationGracePeriodSeconds": spec.kubernetes.grace_seconds + MARGIN_SECONDS,
        **pod_basics(spec, gpus=spec.gpus),
        **placement(spec),
        **resource_claims(spec),
        **non_empty(initContainers=list(init_containers)),
        "containers": [trainer],
        "volumes": volumes(spec, cache_from_template=cache_from_template),
    }
    return {"metadata": pod_metadata(spec, TRAINER), "spec": pod}
