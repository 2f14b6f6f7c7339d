"""Environment variables of the pods: rendezvous, time limits, caches, NCCL, and the user's own and secret ones."""

from __future__ import annotations

from kubetune.config.schema.cluster import cores
from kubetune.k8s.manifests.spec import INSTANCE, PORT, Manifest, RunSpec
from kubetune.k8s.run_names import CACHE

COMPLETION_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
POD_INDEX = "metadata.labels['apps.kubernetes.io/pod-index']"
RUN = "KUBETUNE_RUN"
RUN_NAME = f"$({RUN})"

# What torchrun, the operators or kubetune itself set: a value from the config would break the rendezvous.
RESERVED = frozenset(
    "PET_NNODES PET_NPROC_PER_NODE PET_NODE_RANK PET_MASTER_ADDR PET_MASTER_PORT PET_MAX_RESTARTS PET_SHUTDOWN_TIMEOUT "
    "PET_RDZV_BACKEND PET_RDZV_ENDPOINT PET_RDZV_ID RANK LOCAL_RANK GROUP_RANK ROLE_RANK WORLD_SIZE LOCAL_WORLD_SIZE "
    "MASTER_ADDR MASTER_PORT NODE_RANK JOB_COMPLETION_INDEX".split()
)


def value(name: str, text: str | int) -> Manifest:
    """A variable with a plain value."""
    return {"name": name, "value": str(text)}


def field(name: str, path: str) -> Manifest:
    """A variable that holds a field of the pod itself."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def rendezvous(spec: RunSpec, master: str, rank_field: str) -> list[Manifest]:
    """Variables of torchrun where no operator sets them: a fixed rank by pod index, and rank 0's pod as the master.

    A static rendezvous, so that rank 0 is always pod 0: its log and its results are where one looks for them. The
    master's address holds the run's name as the pod's label says it, so that it follows a name that kustomize changes.
    """
    return [
        field(RUN, f"metadata.labels['{INSTANCE}']"),
        value("PET_NNODES", spec.nodes),
        value("PET_NPROC_PER_NODE", spec.processes),
        field("PET_NODE_RANK", rank_field),
        value("PET_MASTER_ADDR", master),
        value("PET_MASTER_PORT", PORT),
    ]


def limits(spec: RunSpec) -> list[Manifest]:
    """No restarts inside a pod, since Kubernetes restarts the gang; and the time to save after SIGTERM.

    A surviving torchrun that restarts its workers alone waits a minute for an address nobody publishes again.
    """
    return [
        value("PET_MAX_RESTARTS", 0),
        value("PET_SHUTDOWN_TIMEOUT", spec.kubernetes.grace_seconds),
    ]


def _everywhere(spec: RunSpec) -> list[Manifest]:
    """Variables of every container: its own name for logs, and a home that can be written.

    The root file system is read-only, and the user has no entry in /etc/passwd for torch to look up. What an
    initialiser fetches is where all pods find it.
    """
    hub = spec.shared if spec.kubernetes.initialisers else CACHE
    return [
        value("PYTHONUNBUFFERED", 1),
        field("POD_NAME", "metadata.name"),
        field("NODE_NAME", "spec.nodeName"),
        value("HOME", "/tmp"),
        value("USER", "kubetune"),
        value("HF_HOME", f"{hub}/hf"),
        value("XDG_CACHE_HOME", CACHE),
        value("TORCHINDUCTOR_CACHE_DIR", f"{CACHE}/inductor"),
        value("TRITON_CACHE_DIR", f"{CACHE}/triton"),
    ]


def _network(spec: RunSpec) -> list[Manifest]:
    found: list[Manifest] = []
    if spec.gpus:
        found += [value("NCCL_DEBUG", "WARN"), value("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1)]
    if interface := spec.kubernetes.network_interface:
        found += [value("NCCL_SOCKET_IFNAME", interface), value("GLOO_SOCKET_IFNAME", interface)]
    if spec.kubernetes.profile == "rdma":
        found += [value("NCCL_IB_HCA", spec.kubernetes.rdma.hca)]
    return found


def _threads(spec: RunSpec) -> list[Manifest]:
    """One thread per core asked for: a pod sees all cores of its node and would start a thread for each."""
    cpu = spec.config.compute.cpu
    return [value("OMP_NUM_THREADS", max(1, int(cores(cpu) // spec.processes)))] if cpu else []


def secrets(spec: RunSpec) -> list[Manifest]:
    """Variables that refer to keys of Secrets; no value is ever written into a manifest."""
    return [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": ref.secret, "key": ref.key or name}}}
        for name, ref in spec.kubernetes.secrets.items()
    ]


def _with_users(spec: RunSpec, ours: list[Manifest]) -> list[Manifest]:
    """Our variables and the user's plain and secret ones, which replace ours of the same name."""
    user = [value(name, text) for name, text in spec.kubernetes.env.items()]
    return list({entry["name"]: entry for entry in (*ours, *user, *secrets(spec))}.values())


def environment(spec: RunSpec) -> list[Manifest]:
    """Variables of a container that prepares something, or that a person works in."""
    return _with_users(spec, _everywhere(spec))


def trainer_environment(spec: RunSpec, rendezvous: list[Manifest]) -> list[Manifest]:
    """Variables of the trainer: the rendezvous and the time limits first, since they are what people look for."""
    offline = [value("HF_HUB_OFFLINE", 1), value("HF_DATASETS_OFFLINE", 1)] if spec.offline else []
    return _with_users(
        spec,
        [
            *rendezvous,
            *limits(spec),
            *_everywhere(spec),
            *offline,
            *_threads(spec),
            *_network(spec),
        ],
    )
