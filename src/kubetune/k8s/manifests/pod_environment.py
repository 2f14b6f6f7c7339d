"""Environment variables of the pods: rendezvous, time limits, caches, NCCL, and the user's own and secret ones."""

from __future__ import annotations

from kubetune.base.registry.address import STORE
from kubetune.config.schema.quantities import cores
from kubetune.k8s.manifests.run_spec import INSTANCE, PORT, Manifest, RunSpec
from kubetune.k8s.manifests.storage import login_secret
from kubetune.k8s.run_names import CACHE, DOCKER_FOLDER

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
    """Return a variable with a plain value."""
    return {"name": name, "value": str(text)}


def field(name: str, path: str) -> Manifest:
    """Return a variable that holds a field of the pod itself."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def secret_value(name: str, secret: str, key: str) -> Manifest:
    """Return a variable that refers to a key of a Secret. No secret value is ever written into a manifest."""
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def rendezvous(spec: RunSpec, master: str, rank_field: str) -> list[Manifest]:
    """Return torchrun's variables where no operator sets them: rank by pod index, and the pod of rank 0 as master.

    Example: the Job `fit` with 2 nodes of 4 GPUs.

        pod          PET_NODE_RANK   ranks     PET_MASTER_ADDR
        fit-0-x7k2p  0               0 1 2 3   fit-0.fit
        fit-1-m9q4d  1               4 5 6 7   fit-0.fit

    The rendezvous is static, so rank 0 is always in pod 0, where people look for its log and its results. The master's
    address contains $(KUBETUNE_RUN), the pod's label, so it follows a name that kustomize changes.
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
    """Return torchrun's limits: no restarts within a pod, and the time to save after SIGTERM."""
    return [
        # Kubernetes restarts the gang. A torchrun that restarted its workers alone would wait a minute for an address
        # that nobody publishes again.
        value("PET_MAX_RESTARTS", 0),
        value("PET_SHUTDOWN_TIMEOUT", spec.kubernetes.grace_seconds),
    ]


def _everywhere(spec: RunSpec) -> list[Manifest]:
    """Return the variables of every container: the pod's name for logs, and a home that can be written."""
    # What an initialiser fetches lies where all pods see it.
    hub = spec.shared if spec.kubernetes.initialisers else CACHE
    images = []
    if spec.base_image is not None and not spec.mounted_base:
        images.append(value(STORE, f"{hub}/images"))
    if login_secret(spec) is not None:
        images.append(value("DOCKER_CONFIG", DOCKER_FOLDER))
    return [
        value("PYTHONUNBUFFERED", 1),
        field("POD_NAME", "metadata.name"),
        field("NODE_NAME", "spec.nodeName"),
        # The root file system is read-only, and the user has no entry in /etc/passwd for torch to look up.
        value("HOME", "/tmp"),
        value("USER", "kubetune"),
        value("HF_HOME", f"{hub}/hf"),
        value("XDG_CACHE_HOME", CACHE),
        *images,
        value("TORCHINDUCTOR_CACHE_DIR", f"{CACHE}/inductor"),
        value("TRITON_CACHE_DIR", f"{CACHE}/triton"),
    ]


def _network(spec: RunSpec) -> list[Manifest]:
    variables: list[Manifest] = []
    if spec.gpus:
        variables.append(value("NCCL_DEBUG", "WARN"))
        variables.append(value("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1))
    interface = spec.kubernetes.network_interface
    if interface:
        variables.append(value("NCCL_SOCKET_IFNAME", interface))
        variables.append(value("GLOO_SOCKET_IFNAME", interface))
    if spec.kubernetes.profile == "rdma":
        variables.append(value("NCCL_IB_HCA", spec.kubernetes.rdma.hca))
    return variables


def _threads(spec: RunSpec) -> list[Manifest]:
    """Return the number of threads of a process: a pod sees all cores of its node and would start a thread for each."""
    cpu = spec.compute.cpu
    if not cpu:
        return []
    return [value("OMP_NUM_THREADS", max(1, int(cores(cpu) // spec.processes)))]


def _with_users(spec: RunSpec, ours: list[Manifest]) -> list[Manifest]:
    """Return our variables and the user's plain and secret ones, which replace ours of the same name."""
    k = spec.kubernetes
    users = [value(name, text) for name, text in k.env.items()]
    users += [secret_value(name, ref.secret, ref.key or name) for name, ref in k.secrets.items()]
    variables = {entry["name"]: entry for entry in [*ours, *users]}
    return list(variables.values())


def environment(spec: RunSpec) -> list[Manifest]:
    """Return the variables of a container that prepares something, or that a person works in."""
    return _with_users(spec, _everywhere(spec))


def trainer_environment(spec: RunSpec, rendezvous: list[Manifest]) -> list[Manifest]:
    """Return the variables of the trainer. Rendezvous and time limits come first, where people look for them."""
    offline = []
    if spec.offline:
        offline = [value("HF_HUB_OFFLINE", 1), value("HF_DATASETS_OFFLINE", 1)]
    variables = [
        *rendezvous,
        *limits(spec),
        *_everywhere(spec),
        *offline,
        *_threads(spec),
        *_network(spec),
    ]
    return _with_users(spec, variables)
