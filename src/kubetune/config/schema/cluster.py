"""`kubernetes`: where a run runs on a cluster, and as what. Its parts are in `volumes`, `placement` and `companions`.

Fields of manifests that no key sets (rank from index, shared memory, grace, failure policy) are decided in
k8s/manifests.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from kubetune.config.schema.base import Section, section_of
from kubetune.config.schema.compute import JupyterConfig, PreprocessConfig, SamplersConfig
from kubetune.config.schema.placement import (
    NodeAffinityConfig,
    RdmaConfig,
    ResourceClaimConfig,
    SchedulingConfig,
    TolerationConfig,
)
from kubetune.config.schema.quantities import (
    EnvName,
    EnvValue,
    Label,
    LabelKey,
    LabelValue,
    Name,
    Quantity,
)
from kubetune.config.schema.volumes import MountConfig, StorageConfig


class SecretKey(Section):
    """A key of a Secret, by reference; a value is never in a run file."""

    secret: Name = Field(description="Name of the Secret.")
    key: str | None = Field(
        None, pattern=r"^[-._a-zA-Z0-9]+$", description="Key in it; left out: the variable's name."
    )


class OperatorConfig(Section):
    """A user, group or account that may operate the runs of a namespace."""

    kind: Literal["User", "Group", "ServiceAccount"] = Field(
        "User", description="What the name is."
    )
    name: str = Field(min_length=1, description="Name as the cluster knows it.")


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
        description="With `storage.cache.access: ReadWriteMany`: the JobSet makes the claim of the cache, which is "
        "deleted with it (`volumeClaimPolicies`).",
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
        description="RuntimeClass of the pods with GPUs, such as `nvidia`; of all pods if the run has none.",
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
        description="How often the whole gang may start again after a failure. Preemptions and drains do not count. Kinds "
        "`statefulset` and `pytorchjob` start again without a limit.",
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
        description="Pods with vLLM that draw the answers of `task: grpo` with `grpo.servers`, whose addresses are theirs, "
        "or that have the model of `distill.teacher`. `kind: jobset` or `job`; with `queue`, `jobset`.",
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
