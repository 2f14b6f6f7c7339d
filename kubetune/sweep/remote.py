"""Runs of a sweep on a cluster: each submitted, stopped and resumed as every run is, by the same functions.

A run ends by itself at its rung and gives its GPUs back; nobody need be there to tell it. Submitted again, it goes on.
"""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from kubetune import errors
from kubetune.cluster import pods
from kubetune.cluster.runs import ObservedRun, exit_status_in, observe, workload_kind
from kubetune.cluster.submit import resume, spec_of, stop, submit
from kubetune.config.schema import Config
from kubetune.config.schema.cluster import VolumeConfig
from kubetune.errors import ConfigError
from kubetune.library.plans import make_plan
from kubetune.lint.config import lint
from kubetune.manifests import local_files, render
from kubetune.manifests.spec import MANAGED_BY, Manifest
from kubetune.manifests.storage import claim_spec
from kubetune.planning.plan import Plan
from kubetune.rundir.exit_status import ExitStatus
from kubetune.sweep.driver import Seen
from kubetune.sweep.recipe import Recipe
from kubetune.sweep.record import Trial, TrialRun

if TYPE_CHECKING:
    from kubetune.kube_api.client import Cluster, Object
    from kubetune.manifests.spec import RunSpec

SWEEP_LABEL, TRIAL_LABEL = "kubetune/sweep", "kubetune/trial"
_LOOK_SECONDS = 2.0


def plan_there(config: Config) -> Plan:
    """The plan of a run on the cluster's nodes, with what this machine can tell of its data."""
    return make_plan(config, gpus=config.compute.gpus_per_node or 0)


def check(config: Config) -> None:
    """Raise ConfigError for a config that no trial could be submitted with."""
    if config.kubernetes is None:
        raise ConfigError("--cluster: the run file has no `kubernetes`; expected at least its image. Nothing was done.")
    if config.kubernetes.kind == "statefulset":
        raise ConfigError(
            "kubernetes.kind: found statefulset, whose pods stay and hold their GPUs when a run has ended; expected "
            "job, jobset, pytorchjob or trainjob for trials. Nothing was changed."
        )
    plan, files = plan_there(config), local_files(config)
    findings = lint(config, plan, render(config, plan, files), files)
    if fatal := [f"{found.key}: {found.text}" for found in findings if found.fatal]:
        raise ConfigError(fatal)


class Remote:
    """A cluster as a place of runs, `slots` at once."""

    def __init__(self, recipe: Recipe, cluster: Cluster, slots: int) -> None:
        self.slots = slots
        self._recipe, self._cluster = recipe, cluster
        self._specs: dict[str, RunSpec] = {}
        self._asked: set[str] = set()

    def make_claims(self, config: Config) -> list[str]:
        """Make the volumes that all trials share, where the config lets several pods have them; their names."""
        assert config.kubernetes is not None
        made = []
        for name, volume in _shared(config):
            claim: Manifest = {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {
                    "name": f"{self._recipe.name}-{name}",
                    "namespace": self._cluster.namespace,
                    "labels": {MANAGED_BY: "kubetune", SWEEP_LABEL: self._recipe.name},
                },
                "spec": claim_spec(volume, "ReadWriteMany"),
            }
            self._cluster.apply(claim)
            made.append(f"{self._recipe.name}-{name}")
        return made

    def config(self, trial: Trial, run: TrialRun) -> Config:
        """The config of a run as it is submitted: labelled, its volumes shared, pausing at its rung."""
        config = self._recipe.config(trial, run)
        assert config.kubernetes is not None
        volumes = {name: VolumeConfig(claim=f"{self._recipe.name}-{name}") for name, _ in _shared(config)}
        labels = {SWEEP_LABEL: self._recipe.name, TRIAL_LABEL: str(trial.number)}
        k = config.kubernetes.model_copy(
            update={
                "labels": {**config.kubernetes.labels, **labels},
                "storage": config.kubernetes.storage.model_copy(update=volumes),
            }
        )
        config = config.model_copy(update={"kubernetes": k, "output": None})
        plan = plan_there(config)
        run.steps, run.devices = plan.num_steps or run.steps, plan.world_size
        return self._recipe.pausing(config, plan, trial) if self._recipe.search.rungs else config

    def start(self, trial: Trial, run: TrialRun) -> None:
        """Submit a run, or let it go on to its trial's next rung; one that is on its way there is left alone."""
        config = self.config(trial, run)
        files = local_files(config)
        run.earlier_seconds = run.seconds
        job = submit(self._cluster, config, files, confirm=lambda question: True)
        spec = self._specs[run.name] = spec_of(config, files).in_namespace(self._cluster.namespace)
        self._asked.discard(run.name)
        if job.outcome == "unchanged" and job.state == "stopped":
            resume(self._cluster, spec)

    def look(self, run: TrialRun) -> Seen:
        """The run by its workload and pods: these tell how far it is, or have left it with Kubernetes at their end."""
        spec = self._specs[run.name]
        seen = observe(self._cluster, spec)
        progress = seen.progress or {}
        best = progress.get("best") or {}
        seconds = run.earlier_seconds + sum(_held(pod) for pod in seen.pods if pods.node_number(pod) == 0)
        return Seen(_status(seen, spec), progress.get("step"),
                    progress.get("steps"), best.get("value"), seconds)  # fmt: skip

    def stop(self, run: TrialRun) -> None:
        """Ask a run to save and end, once; it keeps its place on the cluster, and `start` resumes it."""
        if run.name not in self._asked:
            self._asked.add(run.name)
            with suppress(ConfigError):  # it has ended meanwhile
                stop(self._cluster, self._specs[run.name])

    def kill(self) -> None:
        """Nothing: the cluster ends what does not end by itself in its grace time."""

    def wait(self) -> None:
        """Wait for a moment."""
        time.sleep(_LOOK_SECONDS)


def stop_all(cluster: Cluster, name: str) -> list[str]:
    """Stop all runs of a sweep that run, without its driver; their names."""
    from kubetune.cluster.runs import find_run, list_runs

    stopped = []
    for found in list_runs(cluster):
        spec = find_run(cluster, found)
        workload = cluster.get(workload_kind(spec), found) if _sweep_of(spec) == name else None
        if workload is not None and pods.state_of(workload, [])[0] in ("waiting", "running"):
            stop(cluster, spec)
            stopped.append(found)
    return stopped


def _sweep_of(spec: RunSpec) -> str | None:
    return spec.kubernetes.labels.get(SWEEP_LABEL)


def _shared(config: Config) -> list[tuple[str, VolumeConfig]]:
    assert config.kubernetes is not None
    storage = config.kubernetes.storage
    volumes = (("cache", storage.cache), ("outputs", storage.outputs))
    return [(name, volume) for name, volume in volumes if volume.size and volume.access == "ReadWriteMany"]


def _status(seen: ObservedRun, spec: RunSpec) -> ExitStatus | None:
    """The end of a run's last start; None while it goes on, or waits."""
    if seen.state in ("waiting", "running"):
        return None
    if seen.state == "stopped":
        return ExitStatus(errors.PREEMPTED, seen.reason or "it was stopped")
    if seen.state == "absent":
        return ExitStatus(errors.LOST_PEER, "its workload was deleted")
    ended = [told for pod in seen.pods if pods.node_number(pod) == 0 and (told := pods.message_of(pod))]
    # A pod that has just written how it ends may not have ended yet.
    ended += [told] if not ended and (told := exit_status_in(seen.progress)) else []
    if seen.state == "done":
        paused = "Paused" if spec.config.training.pause_at_step else None  # its pods are gone: what else could it be
        told = ended[-1] if ended else {"reason": seen.reason or "done", "error": paused}
        return ExitStatus(errors.OK, str(told["reason"]), told.get("step"), told.get("error"))
    if failed := [told for told in ended if told.get("code")]:
        return ExitStatus(int(failed[-1]["code"]), str(failed[-1]["reason"]), failed[-1].get("step"))
    cause = seen.cause or {}
    return ExitStatus(cause.get("code") or errors.BUG, cause.get("reason") or seen.reason or "it failed")


def _held(pod: Object) -> float:
    """Seconds that a pod's trainer has run."""
    state = pods.trainer_status(pod).get("state") or {}
    span = state.get("terminated") or state.get("running") or {}
    if not (began := span.get("startedAt")):
        return 0.0
    ended = span.get("finishedAt")
    until = datetime.fromisoformat(ended) if ended else datetime.now(UTC)
    return max(0.0, (until - datetime.fromisoformat(began)).total_seconds())
