"""Machines: `compute` (what a run asks for) and `kubernetes` (where it runs).

Fields of manifests that no key sets (rank from index, shared memory, grace, failure policy) are decided in
k8s/manifests.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from kubetune.config.schema.base import Section, section_of

QUANTITY = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"
UNITS = {
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
}
DNS_LABEL = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
DNS_NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
LABEL_KEY = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
LABEL_VALUE = r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$"
ABSOLUTE_PATH = r"^/[^:\x00]*$"


def quantity_bytes(text: str) -> int:
    """Return the bytes of a quantity such as `1.5Gi`. Raise ValueError for anything else."""
    digits = text.rstrip("kKMGTi")
    unit = text[len(digits) :]
    factor = UNITS[unit] if unit else 1
    return int(float(digits) * factor)


def _as_text(value: Any) -> Any:
    """Return the text of a number or truth value, since environment variables hold only texts: "false" for false."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, (int, float)) else value


def cores(text: str | int) -> float:
    """Return the cores of an amount of CPU such as `500m` or `4`."""
    amount = str(text)
    if amount.endswith("m"):
        return int(amount.removesuffix("m")) / 1000
    return float(amount)


# Types of fields. Their patterns are those of the API server, so that a mistake is shown with its line in the run file
# and not by the cluster. The examples appear in messages.
Quantity = Annotated[str, Field(pattern=QUANTITY, examples=["32Gi", "500G"])]
Cores = (
    Annotated[int, Field(ge=1)]
    | Annotated[
        str,
        Field(pattern=r"^([1-9][0-9]*m|[0-9]*\.[0-9]+)$", examples=["500m"]),
        BeforeValidator(_as_text),
    ]
)
Label = Annotated[str, Field(pattern=DNS_LABEL, examples=["team-a"])]
Name = Annotated[str, Field(pattern=DNS_NAME, max_length=253, examples=["hf-token"])]
EnvName = Annotated[str, Field(pattern=ENV_NAME, examples=["NCCL_DEBUG"])]
EnvValue = Annotated[str, BeforeValidator(_as_text)]
LabelKey = Annotated[
    str, Field(pattern=LABEL_KEY, max_length=317, examples=["team", "example.com/team"])
]
LabelValue = Annotated[str, Field(pattern=LABEL_VALUE, examples=["ml"])]
AbsolutePath = Annotated[str, Field(pattern=ABSOLUTE_PATH, examples=["/data"])]


class ComputeConfig(Section):
    """Processes, nodes and their size, and what their time costs."""

    # How many processes, and where.
    nodes: int = Field(1, ge=1, le=4096, description="Machines (pods on a cluster).")
    gpus_per_node: int | None = Field(
        None,
        ge=0,
        le=64,
        description="GPUs on each node. Left out: all of this machine. Kubernetes needs a number: 0 for CPU.",
    )
    processes: int | None = Field(
        None,
        ge=1,
        le=512,
        description="Processes on each node. Left out: one for each GPU, or 1 without GPUs.",
    )
    # What the devices are, for forecasts and MFU.
    peak_tflops: float | None = Field(
        None,
        gt=0,
        description="TFLOP/s that one device can do at best, for MFU. Left out: the data sheet's for known GPUs, else "
        "measured by a matrix product.",
    )
    gpu_memory: Quantity | None = Field(
        None,
        description="Memory of one GPU, such as `80Gi`: `plan` says whether the run fits. Left out: that of the GPUs "
        "here.",
    )
    tokens_per_second: float | None = Field(
        None,
        gt=0,
        description="Tokens that one device trains in a second, from an earlier run's report: for `plan`'s hours.",
    )
    # What they cost, in no particular currency.
    price_per_gpu_hour: float | None = Field(
        None,
        ge=0,
        description="Price of one device for an hour, in your currency: `plan` and the log say what the run costs.",
    )
    cpu: Cores | None = Field(None, description="CPU cores per node, such as `16` or `500m`.")
    memory: Quantity | None = Field(None, description="Memory per node, such as `200Gi`.")


class CsiConfig(Section):
    """An inline CSI volume: its driver, and the driver's parameters."""

    driver: str = Field(
        min_length=1,
        description="Name of the CSI driver, such as `csi-mounted-fs-path.csi.nebius.ai`.",
    )
    attributes: dict[str, str] = Field(
        default_factory=dict, description="The driver's `volumeAttributes`."
    )
    fs_type: str | None = Field(None, description="File system, where the driver wants one.")
    secret: Name | None = Field(None, description="Secret that the driver reads on mounting.")


def _one_source(section: Section, names: tuple[str, ...], *, needed: bool) -> None:
    """Raise ValueError if a section sets several of these keys, or, if one is `needed`, none of them."""
    keys = [name for name in names if getattr(section, name) is not None]
    if len(keys) > 1 or (needed and not keys):
        raise ValueError(
            f"give exactly one of {', '.join(names)}; found {' and '.join(keys) or 'none'}"
        )


class VolumeConfig(Section):
    """A volume of a run: a new claim, an existing one, a folder of the node, or an inline CSI volume."""

    model_config = ConfigDict(populate_by_name=True)

    size: Quantity | None = Field(None, description="Size of a new claim, such as `200Gi`.")
    storage_class: Name | None = Field(
        None, alias="class", description="Storage class; left out: the cluster's default."
    )
    access: Literal["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"] | None = Field(
        None,
        description="Left out: a cache belongs to one pod (`ReadWriteOnce`); outputs are shared "
        "(`ReadWriteMany`) where several pods use them. A cache with `ReadWriteMany` is one claim for all pods.",
    )
    claim: Name | None = Field(None, description="An existing claim instead of a new one.")
    host_path: AbsolutePath | None = Field(
        None, description="A folder of the node instead; not with `restricted`."
    )
    csi: CsiConfig | None = Field(None, description="An inline CSI volume instead.")

    @model_validator(mode="after")
    def _one_kind_of_volume(self) -> VolumeConfig:
        _one_source(self, ("size", "claim", "host_path", "csi"), needed=True)
        if self.size is None and (self.storage_class or self.access):
            raise ValueError(
                "class and access belong to a new claim: give its size too, or leave them out"
            )
        return self


class StorageConfig(Section):
    """The two volumes that every run has."""

    cache: VolumeConfig = Field(
        default_factory=lambda: VolumeConfig(size="100Gi"),
        description="Models, downloads and prepared data, at /cache. No work is lost with it.",
    )
    outputs: VolumeConfig = Field(
        default_factory=lambda: VolumeConfig(size="100Gi"),
        description="Run directories, at /outputs.",
    )


class MountConfig(Section):
    """One more volume in all pods of a run."""

    path: AbsolutePath = Field(description="Where the container sees it.")
    claim: Name | None = Field(None, description="An existing claim.")
    host_path: AbsolutePath | None = Field(
        None, description="A folder of the node; not with `restricted`."
    )
    csi: CsiConfig | None = Field(None, description="An inline CSI volume.")
    config_map: Name | None = Field(None, description="An existing ConfigMap.")
    secret: Name | None = Field(None, description="An existing Secret, each key a file.")
    sub_path: str | None = Field(
        None, pattern=r"^[^/].*$", description="Only this folder of the volume."
    )
    read_only: bool = Field(True, description="The run may only read it.")

    @model_validator(mode="after")
    def _one_source_of_files(self) -> MountConfig:
        _one_source(self, ("claim", "host_path", "csi", "config_map", "secret"), needed=True)
        return self


class SecretKey(Section):
    """A key of a Secret, by reference; a value is never in a run file."""

    secret: Name = Field(description="Name of the Secret.")
    key: str | None = Field(
        None, pattern=r"^[-._a-zA-Z0-9]+$", description="Key in it; left out: the variable's name."
    )


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
        _one_source(self, ("template", "claim"), needed=True)
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


class PreprocessConfig(Section):
    """The Job without GPUs that prepares the run."""

    cpu: Cores | None = Field(
        None, description="CPU cores of the job; left out: 8, or 2 for data that travels with it."
    )
    memory: Quantity | None = Field(
        None, description="Memory of the job; left out: 32Gi, or 4Gi for data that travels with it."
    )
    command: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="What it runs; left out: `kubetune data prepare` with this config.",
    )


class SamplersConfig(Section):
    """Pods with vLLM that draw the answers of `task: grpo`, beside the trainer."""

    replicas: int = Field(1, ge=1, le=256, description="Servers, a pod each.")
    gpus: int = Field(
        1, ge=0, le=64, description="GPUs of each, which share the model; 0 for an image for CPUs."
    )
    cpu: Cores = Field(8, description="CPU cores of each.")
    memory: Quantity = Field("64Gi", description="Memory of each.")
    image: str = Field(
        "vllm/vllm-openai:v0.33.0", min_length=1, description="Image with `vllm serve`."
    )


class JupyterConfig(Section):
    """A pod with JupyterLab beside a run."""

    cpu: Cores = Field(4, description="CPU cores.")
    memory: Quantity = Field("16Gi", description="Memory.")
    gpus: int = Field(0, ge=0, le=64, description="GPUs it holds while it lives.")
    image: str | None = Field(
        None,
        min_length=1,
        description="Another image with JupyterLab; left out: `tools_image`, or the run's.",
    )
    hours: int = Field(
        8, ge=1, le=720, description="The pod ends after this time, so that it cannot be forgotten."
    )


class OperatorConfig(Section):
    """A user, group or account that may operate the runs of a namespace."""

    kind: Literal["User", "Group", "ServiceAccount"] = Field(
        "User", description="What the name is."
    )
    name: str = Field(min_length=1, description="Name as the cluster knows it.")


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
        _one_source(self, ("required", "preferred"), needed=self.slice is None)
        if (self.slice is None) != (self.slice_nodes is None):
            raise ValueError("slice and slice_nodes go together; give both or neither")
        return self


class JobSetConfig(Section):
    """Settings that only a JobSet has."""

    restart: Literal["all", "trainer"] = Field(
        "all",
        description="What starts again after a failure: all Jobs; the trainer's alone, so that nothing is prepared "
        "twice (needs JobSet's feature gate `RestartJob`).",
    )
    exclusive: LabelKey | None = Field(
        None,
        description="Node label of domains, such as racks: no other JobSet runs in the run's domain.",
    )
    cache_with_run: bool = Field(
        False,
        description="With `storage.cache.access: ReadWriteMany`: the JobSet makes the claim of the cache, and deletes it at "
        "its own end (`volumeClaimPolicies`).",
    )


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


class PatchTarget(Section):
    """The rendered objects that a patch is for."""

    kind: str = Field(
        min_length=1, description="Kind of the objects, such as `Job`, `Service` or `Deployment`."
    )
    name: Name | None = Field(None, description="Name of one object; left out: all of this kind.")


class PatchConfig(Section):
    """A patch of rendered objects, for fields that no key sets."""

    target: PatchTarget = Field(description="What is patched, as in kustomize.")
    patch: dict[str, Any] | tuple[dict[str, Any], ...] = Field(
        description="A mapping: a strategic merge patch. A list of `{op, path, value}`: a JSON Patch (RFC 6902)."
    )


# Kinds of workload, each a module of k8s/manifests/kinds.
KindName = Literal["job", "statefulset", "jobset", "pytorchjob", "trainjob"]


class KubernetesConfig(Section):
    """A run on a cluster: its kind of workload, image, volumes, placement, secrets and companions."""

    # What runs, and as what.
    image: str = Field(
        min_length=1, description="Container image with kubetune in it; pin a tag or a digest."
    )
    kind: KindName = Field(
        "job",
        description="What runs the pods. `job` needs nothing installed; `jobset` restarts gangs best.",
    )
    namespace: Label = Field("default", description="Namespace of every object.")
    profile: Literal["restricted", "rdma"] = Field(
        "restricted",
        description="Pod security. `restricted` passes the strictest standard; `rdma` gives what "
        "InfiniBand needs and no more.",
    )
    # Security and users.
    rdma: RdmaConfig = Field(
        default_factory=RdmaConfig, description="InfiniBand, with `profile: rdma`."
    )
    run_as_user: int = Field(
        10001,
        ge=0,
        description="User and group of every process and of new files; not 0 with `restricted`.",
    )

    # Volumes.
    storage: StorageConfig = Field(
        default_factory=StorageConfig, description="The two volumes of a run."
    )
    mounts: tuple[MountConfig, ...] = Field(
        (), description="More volumes: data sets, local models, shared caches."
    )
    shm_size: Quantity | None = Field(
        None, description="/dev/shm; left out: a quarter of `compute.memory`."
    )

    # Variables, secrets and images.
    env: dict[EnvName, EnvValue] = Field(
        default_factory=dict, description="More environment variables; no secrets."
    )
    secrets: dict[EnvName, Annotated[SecretKey, BeforeValidator(section_of("secret"))]] = Field(
        default_factory=dict,
        description="Environment variables from Secrets: `{HF_TOKEN: {secret: hf-token}}`.",
    )
    image_pull_secrets: tuple[Name, ...] = Field((), description="Secrets of private registries.")
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        None,
        description="Left out: Kubernetes' own choice (`Always` for `latest`, else `IfNotPresent`).",
    )
    image_volumes: bool = Field(
        False,
        description="Mount a base that is an image (`oci://registry/name@sha256:…`), once for all pods of a node. This "
        "needs Kubernetes 1.36 and containerd 2.1 or CRI-O 1.31. Left out: each pod fetches it.",
    )
    network_interface: str | None = Field(
        None,
        pattern=r"^[^\s]+$",
        description="NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, such as `eth0`. Left out: they find it themselves.",
    )

    # Network.
    network_policy: bool = Field(
        True,
        description="A NetworkPolicy: only the run's own pods, and `port-forward`, reach its pods. What they reach is "
        "not restricted.",
    )

    # Queue and gang.
    queue: Label | None = Field(None, description="Kueue's LocalQueue that the run waits in.")
    queue_priority: Name | None = Field(None, description="Kueue's WorkloadPriorityClass.")
    priority_class: Name | None = Field(None, description="PriorityClass of the pods.")
    scheduler: Name | None = Field(
        None,
        description="Scheduler of the pods; left out: the default one, or that of `scheduling.gang`.",
    )
    scheduling: SchedulingConfig = Field(
        default_factory=SchedulingConfig,
        description="Whether the pods of several nodes start together.",
    )
    jobset: JobSetConfig = Field(
        default_factory=JobSetConfig, description="Settings that only `kind: jobset` has."
    )
    # Devices and nodes.
    gpu_resource: str = Field(
        "nvidia.com/gpu",
        pattern=r"^[a-z0-9.-]+/[A-Za-z0-9_.-]+$",
        description="Resource name of a GPU.",
    )
    resource_claims: tuple[ResourceClaimConfig, ...] = Field(
        (),
        description="Devices by dynamic resource allocation (Kubernetes 1.34 or newer) for the pods that train.",
    )
    runtime_class: Name | None = Field(
        None,
        description="RuntimeClass of the pods with GPUs, such as `nvidia`; of all pods where the run has none.",
    )
    cpu_limits: bool = Field(
        False,
        description="A CPU limit as high as the request on every container, as some quotas and the static CPU manager "
        "ask for. Left out: none, since a limit throttles.",
    )
    ephemeral_storage: Quantity | None = Field(
        None,
        description="Disk of the node that each container may fill with logs and files: request and limit.",
    )
    node_affinity: tuple[NodeAffinityConfig, ...] = Field(
        (),
        description="Conditions on a node's labels: that it must meet or, with `weight`, should meet.",
    )
    node_selector: dict[LabelKey, LabelValue] = Field(
        default_factory=dict, description="Labels a node must have."
    )
    tolerations: tuple[TolerationConfig, ...] = Field(
        (),
        description="Taints that pods tolerate. Runs with GPUs always tolerate the usual taint of GPU nodes.",
    )
    spread: Literal["required", "preferred", "none"] = Field(
        "required", description="Whether each pod must be on a different machine."
    )
    pack: LabelKey | None = Field(
        None,
        description="Node label, such as `topology.kubernetes.io/zone`: the pods prefer nodes with the same value.",
    )

    # Labels, and rights of people.
    labels: dict[LabelKey, LabelValue] = Field(
        default_factory=dict, description="More labels on every object."
    )
    annotations: dict[LabelKey, str] = Field(
        default_factory=dict, description="More annotations on every object and pod."
    )
    service_account: Name | None = Field(
        None, description="An existing ServiceAccount instead of one without rights."
    )
    operators: tuple[OperatorConfig, ...] = Field(
        (),
        description="Who may watch, enter, copy from, stop and delete this namespace's runs: a Role and a RoleBinding.",
    )

    # For git, and for fields without a key.
    argocd: bool = Field(
        False,
        description="Add sync waves, so that Argo CD applies first what pods mount, then what prepares, then the run.",
    )
    patches: tuple[PatchConfig, ...] = Field(
        (), description="Patches of the rendered objects, for fields that no key sets."
    )

    # Restarts and times.
    max_restarts: int = Field(
        3,
        ge=0,
        le=1000,
        description="How often the whole gang may start again after a failure. Preemptions and drains do not count.",
    )
    max_runtime_seconds: int | None = Field(
        None, ge=60, description="The run is ended after this time."
    )
    ttl_seconds: int | None = Field(
        604800,
        ge=0,
        description="A finished run's pods are removed after this time; null: never. Volumes stay.",
    )
    grace_seconds: int = Field(
        120,
        ge=10,
        le=86400,
        description="Time to save when a pod must go; the pod's own grace period is 30 s longer.",
    )

    # Jobs and pods beside the trainer.
    initialisers: tuple[Literal["model", "data"], ...] = Field(
        (),
        description="What is downloaded and prepared once for all pods, on a CPU node, before GPUs are held; training "
        "then needs no network. It is stored on the cache if that is one volume for all pods, else with the outputs.",
    )
    preprocess: PreprocessConfig | None = Field(
        None,
        description="The CPU-only job in which initialisers run, and your own command in place of `kubetune data prepare`. "
        "`{}` prepares the data there.",
    )
    samplers: SamplersConfig | None = Field(
        None,
        description="Pods with vLLM that draw the answers of `task: grpo` with `grpo.servers`, whose addresses are theirs. "
        "`kind: jobset` or `job`; with `queue`, `jobset`.",
    )
    tools_image: str | None = Field(
        None,
        min_length=1,
        description="Image with kubetune's extras `tracking`, `ui` and `jupyter`, for TensorBoard, the page and "
        "JupyterLab: `scripts/image tools` builds it. Left out: the run's.",
    )
    tensorboard: bool = Field(
        False, description="A TensorBoard Deployment and Service over the outputs volume."
    )
    ui: bool = Field(
        False,
        description="A Deployment and Service of `kubetune ui` over the outputs volume, read-only.",
    )
    jupyter: JupyterConfig | None = Field(
        None, description="A pod with JupyterLab and the run's volumes."
    )
