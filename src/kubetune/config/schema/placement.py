"""Nodes and devices of a run on a cluster, and who starts its pods together."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kubetune.config.schema.base import Section
from kubetune.config.schema.quantities import Label, LabelKey, LabelValue, Name
from kubetune.config.schema.volumes import require_one_source


class TolerationConfig(Section):
    """A taint of nodes that pods tolerate, as in a pod's spec."""

    key: LabelKey | None = Field(
        None, description="Taint's key; left out with `Exists`: every taint."
    )
    operator: Literal["Exists", "Equal"] = Field(
        "Exists", description="How the taint's value is compared."
    )
    value: LabelValue | None = Field(None, description="Taint's value, with `Equal`.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="Left out: all."
    )
    tolerationSeconds: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="How long pods stay on a node that gets the taint, with `NoExecute`; left out: for ever.",
    )

    @model_validator(mode="after")
    def _value_with_equal(self) -> TolerationConfig:
        if self.tolerationSeconds is not None and self.effect != "NoExecute":
            raise ValueError("tolerationSeconds needs effect NoExecute; no other taint ends pods")
        if (self.operator == "Equal") != (self.value is not None) or (
            self.operator == "Equal" and self.key is None
        ):
            raise ValueError("operator Equal needs key and value; Exists takes no value")
        return self


class NodeAffinityConfig(Section):
    """Nodes that pods want or need, by a label."""

    key: LabelKey = Field(description="Label of nodes.")
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"] = Field(
        "In", description="How the label is compared: `Gt` and `Lt` with one whole number."
    )
    values: tuple[LabelValue, ...] = Field(
        (), description="Values to compare with; none with `Exists`."
    )
    weight: int | None = Field(
        None,
        ge=1,
        le=100,
        description="How much such nodes are preferred; left out: no other node will do.",
    )

    @model_validator(mode="after")
    def _as_many_values_as_needed(self) -> NodeAffinityConfig:
        # The same rules as the API server's, which would refuse the pods only after `submit`.
        if self.operator in ("Exists", "DoesNotExist"):
            if self.values:
                raise ValueError(f"operator {self.operator} takes no values")
        elif self.operator in ("Gt", "Lt"):
            if len(self.values) != 1 or not self.values[0].isdecimal():
                raise ValueError(f"operator {self.operator} takes one whole number as its value")
        elif not self.values:
            raise ValueError(f"operator {self.operator} needs values")
        return self


class ResourceClaimConfig(Section):
    """Devices by dynamic resource allocation."""

    name: Label = Field(description="Name of the claim in the pod.")
    template: Name | None = Field(
        None, description="ResourceClaimTemplate from which each pod gets a claim."
    )
    claim: Name | None = Field(
        None, description="An existing ResourceClaim that all pods share instead."
    )
    request: Label | None = Field(
        None, description="Only this request of the claim; left out: all of them."
    )
    gpus: bool = Field(
        False, description="The claim holds the node's GPUs: none is asked for by `gpu_resource`."
    )

    @model_validator(mode="after")
    def _one_source_of_devices(self) -> ResourceClaimConfig:
        require_one_source(self, ("template", "claim"), needed=True)
        return self


class RdmaConfig(Section):
    """Adapters for InfiniBand or RoCE in the pods, and which of them NCCL uses."""

    resource: str | None = Field(
        None, description="Device-plugin resource such as `rdma/hca` that gives a pod the adapters."
    )
    privileged: bool = Field(
        False,
        description="Without a device plugin: mount /dev/infiniband of the node into a privileged container. Whoever gets "
        "into that container is root on the node.",
    )
    devices: int = Field(1, ge=1, le=64, description="How many of the resource each pod gets.")
    hca: str = Field("mlx5", description="NCCL_IB_HCA: the adapters that NCCL uses.")

    @model_validator(mode="after")
    def _privileges_or_a_resource(self) -> RdmaConfig:
        if self.privileged and self.resource is not None:
            raise ValueError(
                "privileged is for nodes without a device plugin; give it or a resource, not both"
            )
        return self


class TopologyConfig(Section):
    """How near each other Kueue places the pods of a run."""

    required: LabelKey | None = Field(
        None,
        description="Level, such as `cloud.provider.com/topology-rack`: all pods are in one domain of it, or none starts.",
    )
    preferred: LabelKey | None = Field(
        None,
        description="Level of the topology: all pods share one domain of it if there is room, else one of a higher level.",
    )
    slice: LabelKey | None = Field(
        None,
        description="Level of the topology: each slice of `slice_nodes` pods must share one domain of it.",
    )
    slice_nodes: int | None = Field(None, ge=1, description="Pods of one slice, with `slice`.")

    @model_validator(mode="after")
    def _levels_that_go_together(self) -> TopologyConfig:
        require_one_source(self, ("required", "preferred"), needed=self.slice is None)
        if (self.slice is None) != (self.slice_nodes is None):
            raise ValueError("slice and slice_nodes go together; give both or neither")
        return self


class SchedulingConfig(Section):
    """Who starts all pods of a run together, and how near each other."""

    gang: Literal["auto", "none", "kueue", "volcano"] = Field(
        "auto",
        description="What starts all pods together or none: Kueue (with `queue`) or a PodGroup of Volcano. `auto`: "
        "Kueue where `queue` is given, Volcano where `scheduler` is `volcano`, else none.",
    )
    queue: Name | None = Field(None, description="Volcano's Queue; left out: its default one.")
    topology: TopologyConfig | None = Field(
        None,
        description="How near each other Kueue places the pods (its topology-aware scheduling).",
    )
