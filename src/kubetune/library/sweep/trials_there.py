"""Trials on a cluster without a driver: their configs and plans, the volumes that they share, and how all are stopped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kubetune import errors
from kubetune.config.schema import Config
from kubetune.config.schema.volumes import StorageConfig, VolumeConfig
from kubetune.errors import ConfigError, EnvironmentFault
from kubetune.k8s.cluster import pods
from kubetune.k8s.cluster.run_lookup import find_run, list_runs, workload_kind
from kubetune.k8s.cluster.stopping import stop
from kubetune.k8s.manifests import local_files
from kubetune.k8s.manifests.kinds.registry import KINDS, kind_of
from kubetune.k8s.manifests.run_spec import MANAGED_BY, Manifest, plan_without_data
from kubetune.k8s.manifests.storage import claim_spec
from kubetune.k8s.run_names import on_volume
from kubetune.library.cluster_connection import open_cluster
from kubetune.library.clusters import checked_manifests
from kubetune.library.plans import make_plan
from kubetune.library.sweep.sweep_record import Trial, TrialRun
from kubetune.library.sweep.trial_configs import Recipe
from kubetune.plan.plan import Plan

if TYPE_CHECKING:
    from kubetune.k8s.api.client import Cluster

# Labels of all objects of a trial's run, by which `sweep stop` finds them.
SWEEP_LABEL = "kubetune/sweep"
TRIAL_LABEL = "kubetune/trial"


def plan_there(config: Config) -> Plan:
    """Return the plan of a run on the cluster's nodes, as far as this machine can read its data."""
    tokenizer = config.model.tokenizer or config.model.path
    kubernetes = config.kubernetes
    is_there = kubernetes is not None and on_volume(kubernetes, tokenizer)
    # Data cannot be counted without the tokenizer.
    if is_there and not Path(tokenizer).is_dir():
        return plan_without_data(config)
    return make_plan(config, gpus=config.compute.gpus_per_node or 0)


def check(config: Config) -> None:
    """Raise ConfigError for a config with which no trial could be submitted."""
    if config.kubernetes is None:
        raise ConfigError(
            "--cluster: the run file has no `kubernetes`; expected at least its image. Nothing was "
            "done."
        )
    kind = config.kubernetes.kind
    if kind_of(kind).never_ends:
        kinds = [name for name in KINDS if not kind_of(name).never_ends]
        raise ConfigError(
            f"kubernetes.kind: found {kind}, whose pods stay and hold their GPUs when a run has "
            f"ended; expected {', '.join(kinds[:-1])} or {kinds[-1]} for trials. Nothing was changed."
        )

    # The first values of all ranges stand for all trials.
    plan = plan_there(config)
    checked_manifests(config, plan, local_files(config))


def make_claims(cluster: Cluster, recipe: Recipe, storage: StorageConfig) -> list[str]:
    """Make the volumes that all trials share. Return their names."""
    names = []
    for volume_name, volume in _shared(storage).items():
        name = f"{recipe.name}-{volume_name}"
        claim: Manifest = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {
                "name": name,
                "namespace": cluster.namespace,
                "labels": {MANAGED_BY: "kubetune", SWEEP_LABEL: recipe.name},
            },
            "spec": claim_spec(volume, "ReadWriteMany"),
        }
        cluster.apply(claim)
        names.append(name)
    return names


def config_there(recipe: Recipe, trial: Trial, run: TrialRun) -> Config:
    """Return a run's config to submit: with labels, with shared volumes, to pause at its rung."""
    config = recipe.config(trial, run)
    kubernetes = config.kubernetes
    assert kubernetes is not None

    # In place of volumes of its own, a run mounts those of `make_claims`.
    volumes = {}
    for volume_name in _shared(kubernetes.storage):
        volumes[volume_name] = VolumeConfig(claim=f"{recipe.name}-{volume_name}")
    labels = {
        **kubernetes.labels,
        SWEEP_LABEL: recipe.name,
        TRIAL_LABEL: str(trial.number),
    }
    storage = kubernetes.storage.model_copy(update=volumes)
    kubernetes = kubernetes.model_copy(update={"labels": labels, "storage": storage})
    config = config.model_copy(update={"kubernetes": kubernetes, "output": None})

    # What the trial costs, and where it pauses, follows from its own values: a batch size is one of them.
    plan = plan_there(config)
    run.steps = plan.num_steps or run.steps
    run.devices = plan.world_size
    if not recipe.search.rungs:
        return config
    training = recipe.pausing(config.training, plan, trial)
    return config.model_copy(update={"training": training})


def _shared(storage: StorageConfig) -> dict[str, VolumeConfig]:
    """Return the volumes that kubetune makes and that several pods may mount, by name."""
    volumes = {"cache": storage.cache, "outputs": storage.outputs}
    shared = {}
    for name, volume in volumes.items():
        if volume.size and volume.access == "ReadWriteMany":
            shared[name] = volume
    return shared


def stop_all(namespace: str | None, name: str) -> list[str]:
    """Stop all runs of a sweep without its driver. Return their names.

    Raise EnvironmentFault if a run could not be stopped.
    """
    cluster = open_cluster(namespace)
    stopped = []
    problems = []
    for run_name in list_runs(cluster):
        spec = find_run(cluster, run_name)
        if spec.kubernetes.labels.get(SWEEP_LABEL) != name:
            continue
        # A run that cannot be stopped must not keep the others from being stopped.
        workload = cluster.get(workload_kind(spec), run_name)
        state, _ = pods.state_of(workload, [])
        if state in ("waiting", "running"):
            try:
                stop(cluster, spec)
                stopped.append(run_name)
            except errors.KubetuneError as error:
                problems.append(f"{run_name}: {error}")
    if problems:
        problems.append(f"Runs that were stopped: {', '.join(stopped) or 'none'}.")
        raise EnvironmentFault("\n".join(problems))
    return stopped
