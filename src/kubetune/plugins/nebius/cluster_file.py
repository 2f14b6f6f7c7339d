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
from kubetune.config.schema.quantities import AbsolutePath, Quantity, quantity_bytes
from kubetune.errors import ConfigError

# Patterns are narrow on purpose: these texts become words of commands and of a shell script.
ResourceName = Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$")]
ResourceId = Annotated[str, Field(pattern=r"^[a-z0-9]+-[a-z0-9]+$")]  # project-e00abc
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
OptionName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]


def gibibytes(size: str) -> int:
    """Return the whole GiB of a quantity such as `2Ti`, rounded up."""
    return math.ceil(quantity_bytes(size) / 2**30)


class FilesystemConfig(Section):
    """Storage that all nodes share."""

    name: ResourceName
    size: Quantity  # such as `2Ti`; whole GiB are made of it
    type: Literal["network_ssd", "network_hdd", "weka", "vast"] = "network_ssd"
    mount_point: AbsolutePath = "/mnt/data"  # on every node


class DiskConfig(Section):
    """The disk that a node starts from; images and each pod's own files lie on it."""

    type: Literal[
        "network_ssd", "network_hdd", "network_ssd_io_m3", "network_ssd_non_replicated"
    ] = "network_ssd"
    size: Quantity = "200Gi"


class NodeGroupConfig(Section):
    """Nodes that are alike."""

    name: ResourceName
    nodes: Annotated[int, Field(ge=1, le=1000)] | None = None  # left out: `options` say it
    platform: Word  # such as `gpu-h100-sxm` or `cpu-d3`
    preset: Word  # size of a node, such as `1gpu-16vcpu-200gb`
    boot_disk: DiskConfig = Field(default_factory=DiskConfig)
    drivers_preset: Word | None = None  # GPU drivers of the image, such as `cuda12`
    infiniband_fabric: Word | None = None  # such as `fabric-3`: a GPU cluster is made for the group
    # more options of `nebius mk8s node-group create`, such as `template-preemptible`
    options: dict[OptionName, str] = Field(default_factory=dict)


class CsiConfig(Section):
    """The driver of volumes on the shared filesystem."""

    # values of its Helm chart, such as tolerations
    values: dict[str, str] = Field(default_factory=dict)


class NebiusCluster(Section):
    """All of a cluster file."""

    provider: Literal["nebius"]
    name: ResourceName  # of the cluster, and of its context in the kubeconfig
    project: ResourceId | None = None  # left out: that of the CLI's profile
    kubernetes_version: str = Field(pattern=r"^1\.[0-9]{1,2}$")  # such as `1.33`
    subnet: ResourceId  # of `nebius vpc subnet list`
    public_endpoint: bool = True  # the API server is reached from the internet
    # The nodes act as this account, which is made if there is none of this name.
    service_account: ResourceName | None = None
    filesystem: FilesystemConfig | None = None  # mounted by every node
    node_groups: tuple[NodeGroupConfig, ...]
    csi: CsiConfig = Field(default_factory=CsiConfig)

    @model_validator(mode="after")
    def _fits_together(self) -> NebiusCluster:
        """Raise ValueError with each mistake in a line that begins with its key."""
        wrong = []
        if not self.node_groups:
            wrong.append("node_groups: there is none; expected at least one")
        names = [group.name for group in self.node_groups]
        if len(set(names)) < len(names):
            wrong.append("node_groups: two have the same name")
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
    if error["type"] == "value_error":
        # Checks of the whole file name the key themselves.
        lines = str(error["ctx"]["error"]).splitlines()
        return [Problem(tree.origin((line.partition(":")[0],)), line) for line in lines]
    message = error["msg"]
    if error["type"] == "extra_forbidden":
        message = "unknown key; docs/nebius.md lists those that there are"
    elif error["type"] != "missing":
        value = json.dumps(tree.get(path), ensure_ascii=False)[:60]
        message = f"found {value}; {message}"
    return [Problem(tree.origin(path), f"{dotted(path)}: {message}")]
