"""The sections of the config that speak of machines: `compute` (what is asked for) and `kubernetes` (where it runs).

A leaf of schema.py, kept apart so that manifests and their settings can grow without it.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ClusterSection(BaseModel):
    """Like schema.Section: immutable, and a key it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=True)


class ComputeConfig(ClusterSection):
    nodes: int = Field(1, ge=1, le=4096, description="Machines (pods on a cluster).")
    gpus_per_node: int | None = Field(
        None, ge=0, le=64, description="GPUs, and so processes, on each node. Left out: all that are there."
    )
    processes: int | None = Field(
        None, ge=1, le=512, description="Processes on each node without GPUs. Left out: 1 on a laptop."
    )
    cpu: int | None = Field(None, ge=1, description="CPU cores per node.")
    memory: str | None = Field(None, pattern=r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$", description="Memory per node.")


class KubernetesConfig(ClusterSection):
    namespace: str = Field("default", description="Namespace of every object.")
