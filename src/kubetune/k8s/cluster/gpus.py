"""GPUs of all pods of a run, as nvidia-smi in each of them tells, and those of the nodes, as their labels tell."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kubetune.base.gpus import GPU_QUERY, parse_gpus
from kubetune.config.schema.cluster import KubernetesConfig
from kubetune.errors import EnvironmentFault
from kubetune.k8s.api.api_errors import NoProgram
from kubetune.k8s.api.client import Cluster
from kubetune.k8s.cluster.asking_pods import PodContainer, on_all

MEMORY_LABEL = "nvidia.com/gpu.memory"  # in MiB, from NVIDIA's feature discovery


@dataclass(frozen=True)
class Gpus:
    """The GPUs of one node."""

    node: int
    pod: str
    rows: list[dict[str, Any]]  # of each GPU the fields that parse_gpus names
    problem: str = ""  # why there are none


def query_gpus(cluster: Cluster, targets: Sequence[PodContainer]) -> list[Gpus]:
    """Ask all pods at once, and return the answers in their order."""

    def query(target: PodContainer) -> Gpus:
        answer = io.BytesIO()
        try:
            code = cluster.exec(
                target.pod, target.container, GPU_QUERY, stdout=answer, stderr=answer
            )
        except NoProgram:
            problem = (
                "there is no nvidia-smi in this pod, which has a GPU only if the run asks for one"
            )
            return Gpus(target.node, target.pod, [], problem)
        except EnvironmentFault as error:
            return Gpus(target.node, target.pod, [], str(error))
        # Both streams in one: if the command failed, they hold its error.
        text = answer.getvalue().decode(errors="replace")
        if code != 0:
            problem = text.strip() or f"nvidia-smi ended with exit code {code}"
            return Gpus(target.node, target.pod, [], problem)
        return Gpus(target.node, target.pod, parse_gpus(text))

    return on_all(query, targets)


@dataclass(frozen=True)
class NodeGpus:
    """The GPUs of a node that pods of a run may have."""

    gpus: int
    gpu_bytes: int | None  # of each, None if no label tells it
    is_cordoned: bool  # no new pod gets on the node for now


def gpus_of_nodes(cluster: Cluster, kubernetes: KubernetesConfig) -> list[NodeGpus]:
    """Return the GPUs of all nodes that have some, and the labels by which a run selects nodes."""
    wanted = kubernetes.node_selector.items()
    nodes = []
    for node in cluster.list("Node"):
        gpus = int(node["status"].get("allocatable", {}).get(kubernetes.gpu_resource, 0))
        labels = node["metadata"].get("labels", {})
        memory = labels.get(MEMORY_LABEL, "")
        if gpus and wanted <= labels.items():
            gpu_bytes = int(memory) * 2**20 if memory.isdecimal() else None
            is_cordoned = node["spec"].get("unschedulable", False)
            nodes.append(NodeGpus(gpus, gpu_bytes, is_cordoned))
    return nodes
