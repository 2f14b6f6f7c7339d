"""The cluster file: what `kubetune cluster create -f cluster.yaml` makes on Nebius.

Only data and its checks. Nothing is taken from the environment: the same file means the same cluster on any machine.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from kubetune.base.provenance import KeyPath, Origin, Problem, Tree, dotted
from kubetune.base.yaml_reader import read_entries
from kubetune.config.schema.base import Section
from kubetune.config.schema.cluster import (
    AbsolutePath,
    Label,
    Name,
    Quantity,
    quantity_bytes,
)
from kubetune.errors import ConfigError

GIBI = 1 << 30

# Patterns are narrow on purpose: these texts become words of commands and of a shell script.
ResourceName = Annotated[
    str, Field(pattern=r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$", examples=["tune-gpu"])
]
ResourceId = Annotated[str, Field(pattern=r"^[a-z0-9]+-[a-z0-9]+$", examples=["project-e00abc"])]
Chart = Annotated[str, Field(pattern=r"^[A-Za-z0-9:/._-]+$", description="Helm chart.")]
ChartVersion = Annotated[
    str,
    Field(
        pattern=r"^v?[0-9]+(\.[0-9]+){0,2}([+-][A-Za-z0-9.+-]+)?$",
        examples=["0.19.2"],
        description="Its version.",
    ),
]
OptionName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]


def gibibytes(size: str) -> int:
    """Return the whole GiB of a quantity such as `2Ti`, rounded up."""
    return math.ceil(quantity_bytes(size) / GIBI)


class FilesystemConfig(Section):
    """Storage that all nodes share."""

    name: ResourceName = Field(description="Name of the shared filesystem.")
    size: Quantity = Field(description="Such as `2Ti`; whole GiB are made of it.")
    type: Literal["network_ssd", "network_hdd", "weka", "vast"] = Field(
        "network_ssd", description="Kind of storage."
    )
    block_size_bytes: int = Field(4096, ge=512, le=1 << 20, description="Block size.")
    mount_tag: ResourceName = Field(
        "csi-storage", description="What the nodes know it by (virtiofs)."
    )
    mount_point: AbsolutePath = Field("/mnt/data", description="Where every node mounts it.")


class DiskConfig(Section):
    """The disk that a node starts from."""

    type: Literal[
        "network_ssd", "network_hdd", "network_ssd_io_m3", "network_ssd_non_replicated"
    ] = Field("network_ssd", description="Kind of disk.")
    size: Quantity = Field("200Gi", description="Size; images and each pod's own files lie on it.")


class NodeGroupConfig(Section):
    """Nodes that are alike."""

    name: ResourceName = Field(description="Name of the group.")
    nodes: int | None = Field(
        None, ge=1, le=1000, description="How many nodes; left out: `options` say it."
    )
    platform: str = Field(
        pattern=r"^[a-z0-9-]+$", description="Such as `gpu-h100-sxm` or `cpu-d3`."
    )
    preset: str = Field(
        pattern=r"^[a-z0-9-]+$", description="Size of a node, such as `1gpu-16vcpu-200gb`."
    )
    boot_disk: DiskConfig = Field(default_factory=DiskConfig, description="Disk of each node.")
    drivers_preset: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9._-]+$",
        description="GPU drivers of the image, such as `cuda12`.",
    )
    infiniband_fabric: str | None = Field(
        None,
        pattern=r"^[a-z0-9-]+$",
        description="Fabric such as `fabric-3`: a GPU cluster is made for the group.",
    )
    options: dict[OptionName, str] = Field(
        default_factory=dict,
        description="More options of `nebius mk8s node-group create`, such as `template-preemptible`.",
    )


class CsiChartConfig(Section):
    """The driver of volumes on the shared filesystem."""

    chart: Chart = Field(
        "oci://cr.eu-north1.nebius.cloud/mk8s/helm/csi-mounted-fs-path",
        description="Helm chart of the driver that makes volumes of folders on the shared filesystem.",
    )
    version: ChartVersion = "0.1.3"
    namespace: Label = Field("kube-system", description="Where the driver runs.")
    storage_class: Name = Field(
        "csi-mounted-fs-path-sc", description="The storage class that the chart makes."
    )
    values: dict[str, str] = Field(
        default_factory=dict, description="More values of the chart, such as tolerations."
    )


class ClaimConfig(Section):
    """A claim on the shared filesystem."""

    name: Name = Field(
        description="Name of the claim; `kubernetes.storage.outputs.claim` of a run file names it."
    )
    namespace: Label = Field("default", description="Its namespace; made if it is not there.")
    size: Quantity = Field(description="Size of the claim.")


class NebiusCluster(Section):
    """All of a cluster file."""

    provider: Literal["nebius"] = Field(description="Whose cloud it is.")
    name: ResourceName = Field(
        description="Name of the cluster, and of its context in the kubeconfig."
    )
    project: ResourceId | None = Field(
        None, description="Project; left out: that of the CLI's profile."
    )
    kubernetes_version: str = Field(pattern=r"^1\.[0-9]{1,2}$", description="Such as `1.33`.")
    subnet: ResourceId | None = Field(
        None, description="Id of a subnet; left out: the project's only one."
    )
    public_endpoint: bool = Field(
        True, description="Whether the API server is reached from the internet."
    )
    service_account: ResourceName | None = Field(
        None, description="The nodes act as this account, made if there is none of this name."
    )
    filesystem: FilesystemConfig | None = Field(
        None, description="Shared filesystem, mounted by every node."
    )
    node_groups: tuple[NodeGroupConfig, ...] = Field(description="The nodes.")
    csi: CsiChartConfig = Field(
        default_factory=CsiChartConfig, description="Driver of the shared volumes."
    )
    claims: tuple[ClaimConfig, ...] = Field(
        (), description="Shared claims (ReadWriteMany) on the filesystem."
    )
    ready_minutes: int = Field(
        60, ge=1, le=1440, description="How long each part may take until it runs."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> NebiusCluster:
        """Raise ValueError with each mistake in a line that begins with its key."""
        wrong = []
        if self.claims and not self.filesystem:
            wrong.append(
                "claims: they lie on the shared filesystem; add filesystem, or leave them out"
            )
        if not self.node_groups:
            wrong.append("node_groups: there is none; expected at least one")
        names = [group.name for group in self.node_groups]
        if len(set(names)) < len(names):
            wrong.append("node_groups: two have the same name")
        keys = [(claim.namespace, claim.name) for claim in self.claims]
        if len(set(keys)) < len(keys):
            wrong.append("claims: two have the same name in one namespace")
        # Without drivers a node of GPUs runs, and no pod ever sees a GPU.
        for group in self.node_groups:
            if group.platform.startswith("gpu-") and group.drivers_preset is None:
                wrong.append(
                    f"node_groups: {group.name} has GPUs but no drivers_preset; "
                    "`nebius mk8s node-group get-compatibility-matrix` lists them"
                )
        if wrong:
            raise ValueError("\n".join(wrong))
        return self

    @property
    def context(self) -> str:
        """Return the name of the cluster's context in the kubeconfig."""
        return f"nebius-{self.name}"


def load_cluster(path: Path) -> NebiusCluster:
    """Read the cluster file. Raise ConfigError with every mistake and its line."""
    # The tree keeps the line of each key, which pydantic's errors do not have.
    entries, problems = read_entries(path)
    tree = Tree(Origin(str(path)))
    tree.put(entries)
    try:
        config = NebiusCluster.model_validate_json(json.dumps(tree.data), strict=True)
    except ValidationError as error:
        for mistake in error.errors(include_url=False):
            problems += _explain(mistake, tree)
    if problems:
        lines = dict.fromkeys(str(problem) for problem in sorted(problems))
        raise ConfigError([*lines, "Nothing was made."])
    return config


def _explain(error: ErrorDetails, tree: Tree) -> list[Problem]:
    """Return a mistake in words, with its line."""
    path: KeyPath = error["loc"]
    origin = tree.origin(path)
    name = dotted(path)
    if error["type"] == "missing":
        return [Problem(origin, f"{name}: missing")]
    if error["type"] == "extra_forbidden":
        return [Problem(origin, f"{name}: unknown key; docs/nebius.md lists those that there are")]
    if error["type"] == "value_error":
        # Checks of the whole file name the key themselves.
        lines = str(error["ctx"]["error"]).splitlines()
        return [Problem(tree.origin((line.partition(":")[0],)), line) for line in lines]
    value = json.dumps(tree.get(path), ensure_ascii=False)[:60]
    advice = ""
    # YAML reads 1.30 as the number 1.3.
    if error["type"] == "string_type":
        advice = "; write it in quotes"
    return [Problem(origin, f"{name}: found {value}; {error['msg']}{advice}")]
