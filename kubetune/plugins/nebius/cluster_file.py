"""The cluster file: what `kubetune cluster create -f cluster.yaml` makes on Nebius, and what it costs.

Only data and its checks. Nothing is taken from the environment: the same file means the same cluster on any machine.
Prices are the user's to state, since they change and contracts differ; what has none is said to have none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from kubetune.base.humanize import nearest
from kubetune.base.provenance import KeyPath, Origin, Problem, Tree, dotted
from kubetune.base.yaml_reader import read_entries
from kubetune.config.schema.base import Section
from kubetune.config.schema.cluster import (
    AbsolutePath,
    Label,
    LabelKey,
    LabelValue,
    Name,
    Quantity,
    quantity_bytes,
)
from kubetune.errors import ConfigError

GIBI = 1 << 30
HOURS_PER_MONTH = 730

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
Price = Annotated[float | None, Field(ge=0)]


def gibibytes(size: str) -> int:
    """Whole GiB of a quantity such as `2Ti`, rounded up."""
    return math.ceil(quantity_bytes(size) / GIBI)


class ServiceAccountConfig(Section):
    """The account that nodes act as."""

    name: ResourceName = Field(
        description="The nodes act as this account; made if there is none of this name."
    )
    group: ResourceId | None = Field(
        None,
        description="Id of a group it is put into, such as the tenant's `viewers`, to pull private images.",
    )


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
    price_per_gib_month: Price = Field(None, description="Price of one GiB for a month.")


class DiskConfig(Section):
    """The disk that a node starts from."""

    type: Literal[
        "network_ssd", "network_hdd", "network_ssd_io_m3", "network_ssd_non_replicated"
    ] = Field("network_ssd", description="Kind of disk.")
    size: Quantity = Field("200Gi", description="Size; images and each pod's own files lie on it.")
    price_per_gib_month: Price = Field(None, description="Price of one GiB for a month.")


class AutoscalingConfig(Section):
    """Bounds between which a group has as many nodes as pods need."""

    min: int = Field(0, ge=0, le=1000, description="As few nodes while nothing wants more.")
    max: int = Field(ge=1, le=1000, description="As many nodes at most.")

    @model_validator(mode="after")
    def _in_order(self) -> AutoscalingConfig:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is more than max {self.max}")
        return self


class TaintConfig(Section):
    """A taint that nodes of a group begin with."""

    key: LabelKey = Field(
        description="Key; only pods that tolerate it run there: `kubernetes.tolerations` of a run."
    )
    value: LabelValue = Field("", description="Its value.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] = Field(
        "NoSchedule", description="What happens to others."
    )


class NodeGroupConfig(Section):
    """Nodes that are alike."""

    name: ResourceName = Field(description="Name of the group.")
    nodes: int | None = Field(None, ge=1, le=1000, description="How many nodes, all the time.")
    autoscaling: AutoscalingConfig | None = Field(
        None, description="As many nodes as pods need, instead of `nodes`."
    )
    preemptible: bool = Field(
        False,
        description="Cheaper nodes that may be taken away at any moment; runs save and go on elsewhere.",
    )
    taints: tuple[TaintConfig, ...] = Field((), description="Taints of the Kubernetes nodes.")
    subnet: ResourceName | None = Field(
        None, description="Id or name of another subnet than the cluster's."
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
    labels: dict[LabelKey, LabelValue] = Field(
        default_factory=dict, description="Labels of the Kubernetes nodes."
    )
    price_per_hour: Price = Field(None, description="Price of one node for an hour.")

    @model_validator(mode="after")
    def _fixed_or_scaled(self) -> NodeGroupConfig:
        if (self.nodes is None) == (self.autoscaling is None):
            raise ValueError("give either nodes or autoscaling")
        return self

    @property
    def most(self) -> int:
        """Largest number of nodes."""
        return self.autoscaling.max if self.autoscaling else self.nodes or 0


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


class JobSetChartConfig(Section):
    """The JobSet controller."""

    chart: Chart = "oci://registry.k8s.io/jobset/charts/jobset"
    version: ChartVersion = "0.12.0"
    namespace: Label = Field("jobset-system", description="Where its controller runs.")
    values: dict[str, str] = Field(default_factory=dict, description="Values of the chart.")


class KueueChartConfig(JobSetChartConfig):
    """The Kueue controller."""

    chart: Chart = "oci://registry.k8s.io/kueue/charts/kueue"
    version: ChartVersion = "0.19.2"
    namespace: Label = Field("kueue-system", description="Where its controller runs.")


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
    subnet: ResourceName | None = Field(
        None, description="Id or name; left out: the project's only subnet."
    )
    public_endpoint: bool = Field(
        True, description="Whether the API server is reached from the internet."
    )
    service_account: ServiceAccountConfig | None = Field(
        None, description="Account of the nodes; left out: none."
    )
    filesystem: FilesystemConfig | None = Field(
        None, description="Shared filesystem, mounted by every node."
    )
    node_groups: tuple[NodeGroupConfig, ...] = Field(min_length=1, description="The nodes.")
    csi: CsiChartConfig = Field(
        default_factory=CsiChartConfig, description="Driver of the shared volumes."
    )
    jobset: JobSetChartConfig | None = Field(
        None, description="JobSet, which `kind: jobset` needs; `{}` installs it."
    )
    kueue: KueueChartConfig | None = Field(
        None, description="Kueue, for runs with `kubernetes.queue`."
    )
    claims: tuple[ClaimConfig, ...] = Field(
        (), description="Shared claims (ReadWriteMany) on the filesystem."
    )
    ready_minutes: int = Field(
        60, ge=1, le=1440, description="How long each part may take until it runs."
    )
    price_per_hour: Price = Field(None, description="Price of the control plane for an hour.")
    currency: str = Field("USD", pattern=r"^[A-Z]{3}$", description="Of all prices.")

    @model_validator(mode="after")
    def _fits_together(self) -> NebiusCluster:
        wrong = []
        if self.claims and not self.filesystem:
            wrong.append(
                "claims: they lie on the shared filesystem; add filesystem, or leave them out"
            )
        names = [group.name for group in self.node_groups]
        if len(set(names)) < len(names):
            wrong.append("node_groups: two have the same name")
        keys = [(claim.namespace, claim.name) for claim in self.claims]
        if len(set(keys)) < len(keys):
            wrong.append("claims: two have the same name in one namespace")
        wrong += [
            f"node_groups: {group.name} has GPUs but no drivers_preset; "
            "`nebius mk8s node-group get-compatibility-matrix` lists them"
            for group in self.node_groups
            if group.platform.startswith("gpu-") and group.drivers_preset is None
        ]
        if wrong:
            raise ValueError("\n".join(wrong))
        return self

    @property
    def context(self) -> str:
        """Name of the cluster's context in the kubeconfig."""
        return f"nebius-{self.name}"


def costs(
    config: NebiusCluster, there: Collection[str] | None = None
) -> Iterator[tuple[str, float | None]]:
    """Price of each part an hour; None where the file states no price. `there`: only of the steps with these keys."""
    yield from (
        (what, price) for key, what, price in _costs(config) if there is None or key in there
    )


def _costs(config: NebiusCluster) -> Iterator[tuple[str, str, float | None]]:
    yield "cluster", "control plane", config.price_per_hour
    if disk := config.filesystem:
        what = f"filesystem {disk.name} ({gibibytes(disk.size):,} GiB)"
        yield "filesystem", what, _hourly(disk.size, disk.price_per_gib_month)
    for group in config.node_groups:
        key, each = f"node-group/{group.name}", group.price_per_hour
        count = f"up to {group.most}" if group.autoscaling else f"{group.most}"
        yield (
            key,
            f"nodes {group.name} ({count} × {group.preset})",
            None if each is None else group.most * each,
        )
        disk_price = _hourly(group.boot_disk.size, group.boot_disk.price_per_gib_month)
        what = f"boot disks {group.name} ({count} × {gibibytes(group.boot_disk.size):,} GiB)"
        yield key, what, None if disk_price is None else group.most * disk_price


def _hourly(size: str, price_per_gib_month: float | None) -> float | None:
    return (
        None
        if price_per_gib_month is None
        else gibibytes(size) * price_per_gib_month / HOURS_PER_MONTH
    )


def load_cluster(path: Path) -> NebiusCluster:
    """The cluster file. Raises ConfigError with every mistake and its line."""
    entries, problems = read_entries(path)
    tree = Tree(Origin(str(path)))
    tree.put(entries)
    try:
        config = NebiusCluster.model_validate_json(json.dumps(tree.data), strict=True)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        # A list of which every item is wrong counts as too short as well.
        deeper = {
            each["loc"][: len(each["loc"]) - 1 - n]
            for each in errors
            for n in range(len(each["loc"]) - 1)
        }
        mistakes = [
            each for each in errors if not (each["type"] == "too_short" and each["loc"] in deeper)
        ]
        problems += [problem for each in mistakes for problem in _explain(each, tree)]
    if problems:
        raise ConfigError(
            [*dict.fromkeys(str(problem) for problem in sorted(problems)), "Nothing was made."]
        )
    return config


def _explain(error: ErrorDetails, tree: Tree) -> Iterator[Problem]:
    path: KeyPath = error["loc"]
    origin, name = tree.origin(path), dotted(path)
    match error["type"]:
        case "missing":
            field = _model_at(path[:-1]).model_fields[str(path[-1])]
            yield Problem(origin, f"{name}: missing; expected {field.description}")
        case "extra_forbidden":
            known = list(_model_at(path[:-1]).model_fields)
            close = nearest(str(path[-1]), known)
            yield Problem(origin, f"{name}: unknown key; known here: {close or ', '.join(known)}")
        case "value_error":
            for line in str(error["ctx"]["error"]).splitlines():
                # Those about the whole file name the key themselves.
                own = path or (line.partition(":")[0],)
                yield Problem(tree.origin(own), f"{name}: {line}" if path else line)
        case "string_type":
            found = json.dumps(tree.get(path), ensure_ascii=False)[:60]
            yield Problem(origin, f"{name}: found {found}, which is no text; write it in quotes")
        case _:
            found = json.dumps(tree.get(path), ensure_ascii=False)[:60]
            wanted = (
                error["msg"]
                .replace("Input should be", "expected")
                .replace("String should", "the text should")
            )
            yield Problem(origin, f"{name}: found {found}; {wanted}")


def _model_at(path: KeyPath) -> type[BaseModel]:
    """The section that a path leads to."""
    model: type[BaseModel] = NebiusCluster
    for part in path:
        if isinstance(part, str) and part in model.model_fields:
            for inner in _models(model.model_fields[part].annotation):
                model = inner
    return model


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from _models(inner)
