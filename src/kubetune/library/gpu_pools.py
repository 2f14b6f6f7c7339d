"""The GPUs that a run may have: as they are written, on this machine, or on the nodes of a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kubetune.base.gpus import visible_gpus
from kubetune.config.schema.cluster import KubernetesConfig
from kubetune.config.schema.compute import ComputeConfig
from kubetune.errors import ConfigError, EnvironmentFault
from kubetune.plan.devices import gpu_bytes
from kubetune.plan.proposals import GpuPool

_WAYS_OUT = "give --gpus, such as 2x24GB"


def gpu_pool(
    compute: ComputeConfig,
    kubernetes: KubernetesConfig | None,
    written: str | None,
    environ: Mapping[str, str],
) -> GpuPool:
    """Return the GPUs of a run. `written`: the option, `cluster` for those of the cluster's nodes.

    Without it they are those of `compute`, else those of this machine. Raise ConfigError if there are none, and
    EnvironmentFault for a cluster that does not say.
    """
    if written == "cluster":
        return _of_cluster(kubernetes)
    if written is not None:
        return GpuPool.parse(written)
    gpus = compute.gpus_per_node
    if gpus is None:
        gpus = visible_gpus(environ)
    if not gpus:
        raise ConfigError(f"no GPU is here, and the run asks for none; {_WAYS_OUT}")
    memory = gpu_bytes(compute)
    if memory is None:
        raise ConfigError(f"the memory of the GPUs is not known here; {_WAYS_OUT}")
    return GpuPool(compute.nodes, gpus, memory)


def _of_cluster(kubernetes: KubernetesConfig | None) -> GpuPool:
    """Return the GPUs of the nodes that take pods of the run, are alike, and have the most memory together."""
    from kubetune.k8s.api.api_errors import ApiError
    from kubetune.k8s.cluster.gpus import MEMORY_LABEL, gpus_of_nodes
    from kubetune.library.cluster_connection import open_cluster

    if kubernetes is None:
        raise ConfigError(
            "--gpus: found cluster, but the run file has no section kubernetes; add it"
        )
    try:
        nodes = gpus_of_nodes(open_cluster(kubernetes.namespace), kubernetes)
    except ApiError as error:
        raise EnvironmentFault(f"the nodes of the cluster: {error}; {_WAYS_OUT}") from None
    alike = Counter(
        (node.gpus, node.gpu_bytes)
        for node in nodes
        if node.gpu_bytes is not None and not node.is_cordoned
    )
    if not alike:
        raise EnvironmentFault(
            f"no node that takes pods of the run has both {kubernetes.gpu_resource} and the label {MEMORY_LABEL}; "
            f"{_WAYS_OUT}"
        )

    def memory_of(kind: tuple[int, int]) -> int:
        gpus, each = kind
        return alike[kind] * gpus * each

    most = max(alike, key=memory_of)
    return GpuPool(alike[most], *most)
