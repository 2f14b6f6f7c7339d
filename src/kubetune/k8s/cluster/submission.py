"""A run that is to be applied, beside what the cluster has of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kubetune.config.resolved import dotted_values, load_resolved, resolved
from kubetune.config.schema import Config
from kubetune.config.schema.cluster import KubernetesConfig
from kubetune.config.schema.compute import ComputeConfig
from kubetune.errors import ConfigError
from kubetune.k8s.api.api_errors import ApiError
from kubetune.k8s.api.client import Cluster, Object
from kubetune.k8s.cluster import pods, preparation
from kubetune.k8s.cluster.gpus import gpus_of_nodes
from kubetune.k8s.cluster.run_lookup import read_run, workload_kind
from kubetune.k8s.manifests import render
from kubetune.k8s.manifests.configmap import pod_config
from kubetune.k8s.manifests.initialisers import preprocess_name
from kubetune.k8s.manifests.kinds.kind import State
from kubetune.k8s.manifests.kinds.registry import kind_of
from kubetune.k8s.manifests.run_spec import (
    MANAGED_BY,
    Manifest,
    RunSpec,
    plan_without_data,
    spec_of,
)
from kubetune.plan.devices import device_bytes
from kubetune.plan.fitting import decide_parallelism
from kubetune.plan.plan import Plan
from kubetune.rundir.starts import dated, moved_numbers

Outcome = Literal["submitted", "unchanged", "replaced", "checked"]
JOB = "Job"


@dataclass(frozen=True)
class Submission:
    """A run that is to be applied, beside what the cluster has of it."""

    spec: RunSpec
    objects: list[Manifest]
    kind: str  # of the new workload
    old_kind: str  # of the workload that exists; the same where there is none
    workload: Object | None  # that exists
    old_beside: list[str]  # Jobs that stop and end with that workload
    state: State  # of that workload
    is_same: bool  # the run exists with the same config
    preparing: Object | None  # Job that prepared the run before

    @property
    def replaces(self) -> bool:
        """True if a workload exists that has to go first: the fields of its pods cannot be changed."""
        return self.workload is not None and (not self.is_same or self.state == "failed")

    @property
    def makes_trainer(self) -> bool:
        """True if a trainer begins, so that the data has to be prepared before."""
        return self.replaces or self.workload is None

    @property
    def outcome(self) -> Outcome:
        """Return what came of it, for the user."""
        if self.replaces:
            return "replaced"
        if self.workload is None:
            return "submitted"
        return "unchanged"

    def is_trainer(self, obj: Manifest) -> bool:
        """True if an object is the new workload."""
        return (obj["kind"], obj["metadata"]["name"]) == (self.kind, self.spec.name)

    def is_beside(self, obj: Manifest) -> bool:
        """True if an object is a Job that starts, stops and ends with the new workload."""
        names = kind_of(self.spec.kubernetes.kind).beside(self.spec)
        return obj["kind"] == JOB and obj["metadata"]["name"] in names

    def is_job(self, obj: Manifest) -> bool:
        """True if an object is the Job that prepares the run."""
        return (obj["kind"], obj["metadata"]["name"]) == (JOB, preprocess_name(self.spec))


def compare(
    cluster: Cluster,
    config: Config,
    files: Mapping[str, str],
    change: Callable[[list[Manifest]], list[Manifest]],
) -> Submission:
    """Return a run beside what the cluster has of it. Raise ConfigError when the name belongs to another run."""
    old = read_run(cluster, spec_of(config, files).name)
    old_config = None
    if old is not None:
        old_config = resolved(old.config)
    # A run keeps the date of its first start, which its prompts may show.
    config = config.model_copy(update={"data": dated(config.data, old_config)})
    config = _decided(cluster, config, old_config)
    spec = spec_of(config, files)

    objects = change(render(config, plan_without_data(config), files))
    _check_owner(cluster, spec, old)

    # An earlier submit may have used another kind, whose workload has the same name.
    kind = workload_kind(spec)
    old_kind = kind
    old_beside: list[str] = []
    if old is not None:
        old_kind = workload_kind(old)
        old_beside = kind_of(old.kubernetes.kind).beside(old)
    workload = cluster.get(old_kind, spec.name)
    state, _ = pods.state_of(workload, [])

    is_same = old_config is not None and old_config == _as_seen(spec)
    preparing = preparation.find_job(cluster, spec)
    return Submission(
        spec=spec,
        objects=objects,
        kind=kind,
        old_kind=old_kind,
        workload=workload,
        old_beside=old_beside,
        state=state,
        is_same=is_same,
        preparing=preparing,
    )


def _decided(cluster: Cluster, config: Config, before: Mapping[str, Any] | None) -> Config:
    """Return the config with what `training.parallelism: auto` is on this cluster, for all starts of the run.

    It stays `auto`, for the first pod to decide, where neither run file nor nodes tell the memory of the GPUs, or nobody
    here knows the model. `before`: the config of the run that is there.
    """
    training = config.training
    if training.parallelism != "auto":
        return config
    chosen = "auto" if before is None else before["training"]["parallelism"]
    if chosen == "auto":
        plan = plan_without_data(config)
        assert config.kubernetes is not None
        memory = _memory(cluster, config.compute, config.kubernetes, plan)
        choice = decide_parallelism(config, plan, memory, os.environ)
        if not choice.is_known:
            return config
        chosen = choice.parallelism
        cluster.tell_once(f"training.parallelism: auto -> {chosen}, because {choice.why}")
    training = training.model_copy(update={"parallelism": chosen})
    return config.model_copy(update={"training": training})


def _memory(
    cluster: Cluster, compute: ComputeConfig, kubernetes: KubernetesConfig, plan: Plan
) -> int | None:
    """Return the memory of a process: the least among nodes that pods may be on, None if one of them does not tell."""
    if plan.device == "cpu" or compute.gpu_memory:
        return device_bytes(compute, plan)
    try:
        nodes = gpus_of_nodes(cluster, kubernetes)
    except ApiError:
        return None  # many may not list nodes
    least: int | None = None
    for node in nodes:
        if node.gpus < plan.processes_per_node:
            continue
        if node.gpu_bytes is None:
            return None
        least = min(least or node.gpu_bytes, node.gpu_bytes)
    return least


def _as_seen(spec: RunSpec) -> dict[str, Any]:
    """Return the whole config with the paths that its pods see."""
    return resolved(load_resolved(pod_config(spec)))


def _check_owner(cluster: Cluster, spec: RunSpec, old: RunSpec | None) -> None:
    """Raise ConfigError when another object of this kind, or another run, has the name."""
    if old is None:
        workload = cluster.get(workload_kind(spec), spec.name)
        if workload is not None and pods.labels_of(workload).get(MANAGED_BY) != "kubetune":
            raise ConfigError(
                f"name: {workload['kind']} {spec.name} in namespace {cluster.namespace} is none of kubetune's; choose "
                "another name. Nothing was changed."
            )
        return

    # The run's own ConfigMap is compared, key by key, with what the pods would see now.
    before = dict(dotted_values(resolved(old.config)))
    now = dict(dotted_values(_as_seen(spec)))
    changes = []
    for key, was, value in moved_numbers(before, now):
        changes.append(f"{key} was {was}, now is {value}")

    # The ConfigMap knows a file that travels by its name alone.
    for local_path, pod_path in spec.carried().items():
        name = pod_path.rsplit("/", 1)[-1]
        text = spec.files[local_path]
        if old.files.get(name, text) != text:
            changes.append(f"{name}: its contents have changed")
    if changes:
        raise ConfigError(
            [
                *changes,
                f"name: {spec.name} in namespace {cluster.namespace} is a run with another config; to go on with it "
                "undo these changes, to start afresh choose another name. Nothing was changed.",
            ]
        )
