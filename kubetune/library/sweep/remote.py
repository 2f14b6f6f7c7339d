"""Runs of a sweep on a cluster: each submitted, stopped and resumed as every run is, by the same functions.

A run ends by itself at its rung and gives its GPUs back; nobody need be there to tell it. Submitted again, it goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from kubetune import errors
from kubetune.config.schema import Config
from kubetune.config.schema.cluster import VolumeConfig
from kubetune.errors import ConfigError, EnvironmentFault
from kubetune.k8s.api.api_errors import Unreachable
from kubetune.k8s.api.client import say
from kubetune.k8s.cluster import pods
from kubetune.k8s.cluster.log_follow import wait_for_job
from kubetune.k8s.cluster.preparation import has_own_job
from kubetune.k8s.cluster.runs import (
    ObservedRun,
    exit_status_in,
    find_run,
    list_runs,
    observe,
    workload_kind,
)
from kubetune.k8s.cluster.submit import resume, spec_of, stop, submit
from kubetune.k8s.lint.config import lint
from kubetune.k8s.manifests import local_files, render
from kubetune.k8s.manifests.initialisers import preprocess_name
from kubetune.k8s.manifests.kinds.registry import KINDS, kind_of
from kubetune.k8s.manifests.spec import MANAGED_BY, Manifest
from kubetune.k8s.manifests.spec import plan_there as plan_blindly
from kubetune.k8s.manifests.storage import claim_spec
from kubetune.k8s.run_names import on_volume
from kubetune.library.plans import make_plan
from kubetune.library.sweep.driver import Seen
from kubetune.library.sweep.recipe import Recipe
from kubetune.library.sweep.record import Trial, TrialRun
from kubetune.plan.plan import Plan
from kubetune.rundir.exit_status import ExitStatus

if TYPE_CHECKING:
    from kubetune.k8s.api.client import Cluster, Object
    from kubetune.k8s.manifests.spec import RunSpec

SWEEP_LABEL, TRIAL_LABEL = "kubetune/sweep", "kubetune/trial"
_LOOK_SECONDS = 2.0
_UNSEEN_SECONDS = 900.0
"""Time for which nothing may be heard of the runs, as while a control plane is replaced."""


def plan_there(config: Config) -> Plan:
    """The plan of a run on the cluster's nodes, with what this machine can tell of its data."""
    path, k = config.model.tokenizer or config.model.path, config.kubernetes
    if k is not None and on_volume(k, path) and not Path(path).is_dir():
        return plan_blindly(config)  # without its tokenizer nothing can be told
    return make_plan(config, gpus=config.compute.gpus_per_node or 0)


def check(config: Config) -> None:
    """Raise ConfigError for a config that no trial could be submitted with."""
    if config.kubernetes is None:
        raise ConfigError(
            "--cluster: the run file has no `kubernetes`; expected at least its image. Nothing was done."
        )
    kind = config.kubernetes.kind
    if kind_of(kind).never_ends:
        ending = [name for name in KINDS if not kind_of(name).never_ends]
        raise ConfigError(
            f"kubernetes.kind: found {kind}, whose pods stay and hold their GPUs when a run has ended; expected "
            f"{', '.join(ending[:-1])} or {ending[-1]} for trials. Nothing was changed."
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
        self._beginning: dict[str, Future[None]] = {}
        self._told: set[str] = set()
        self._is_left = False
        self._unseen_since: float | None = None
        self._look_again = 0.0

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
        volumes = {
            name: VolumeConfig(claim=f"{self._recipe.name}-{name}") for name, _ in _shared(config)
        }
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
        spec = self._specs[run.name] = spec_of(config, files).in_namespace(self._cluster.namespace)
        self._asked.discard(run.name)
        if has_own_job(spec):
            # It may prepare for hours, in which the other runs' ends are to be seen.
            begun = self._beginning[run.name] = Future()
            Thread(
                target=_done, args=(begun, partial(self._submit, config, files, run)), daemon=True
            ).start()
        else:
            self._submit(config, files, run)

    def _submit(self, config: Config, files: dict[str, str], run: TrialRun) -> None:
        spec = self._specs[run.name]
        job = submit(
            self._cluster,
            config,
            files,
            confirm=lambda question: True,
            wait=partial(self._see_prepared, run),
        )
        is_stopped = job.outcome == "unchanged" and job.state == "stopped"
        if is_stopped:
            resume(self._cluster, spec)
        if is_stopped or job.outcome != "unchanged":  # its pods are others from now on
            run.earlier_seconds = run.seconds

    def _see_prepared(self, run: TrialRun, spec: RunSpec) -> None:
        """Wait for the Job that prepares a run. Raises Preempted where the run is to stop: then nothing trains."""
        while pods.state_of(self._cluster.get("Job", preprocess_name(spec)), [])[0] in (
            "waiting",
            "running",
        ):
            if run.name in self._asked:
                raise errors.Preempted(0)
            time.sleep(_LOOK_SECONDS)
        wait_for_job(self._cluster, spec, lambda source, text: None)

    def look(self, run: TrialRun) -> Seen:
        """The run by its workload and pods: these tell how far it is, or have left it with Kubernetes at their end.

        An API server that is away for a while ends no search. Raises EnvironmentFault where it stays so.
        """
        if time.monotonic() < self._look_again and not self._is_left:
            return Seen(None)
        try:
            seen = self._seen(run)
        except EnvironmentFault as fault:
            now = time.monotonic()
            self._unseen_since = self._unseen_since or now
            if now - self._unseen_since >= _UNSEEN_SECONDS:
                raise
            self._say_once(
                f"{fault}; runs go on in the cluster and are looked for again for {_UNSEEN_SECONDS:.0f} s"
            )
            self._look_again = now + _LOOK_SECONDS
            return Seen(None)
        self._unseen_since = None
        if seen.status is not None:
            self._specs.pop(run.name)
        return seen

    def _seen(self, run: TrialRun) -> Seen:
        if self._is_left:
            return Seen(ExitStatus(errors.PREEMPTED, "left to the cluster"))
        if begun := self._beginning.get(run.name):
            if not begun.done():
                return Seen(None)
            try:
                self._beginning.pop(run.name).result()
            except errors.KubetuneError as error:
                code = errors.LOST_PEER if isinstance(error, Unreachable) else error.exit_code
                return Seen(ExitStatus(code, str(error)))
        spec = self._specs[run.name]
        seen = observe(self._cluster, spec)
        progress = seen.progress or {}
        best = progress.get("best") or {}
        seconds = run.earlier_seconds + sum(
            _held(pod) for pod in seen.pods if pods.node_number(pod) == 0
        )
        return Seen(_status(seen, spec), progress.get("step"),
                    progress.get("steps"), best.get("value"), seconds)  # fmt: skip

    def stop(self, run: TrialRun) -> None:
        """Ask a run to save and end, once; it keeps its place on the cluster, and `start` resumes it."""
        if run.name in self._asked:
            return
        if run.name not in self._beginning:
            try:
                stop(self._cluster, self._specs[run.name])
            except ConfigError:
                pass  # it has ended meanwhile
            except EnvironmentFault as fault:
                self._say_once(
                    str(fault)
                )  # such as a queue that does not know it yet: asked again in a moment
                return
        self._asked.add(run.name)

    def _say_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            say(text)

    def abandon(self) -> str:
        """Words for what becomes of the runs when the driver ends without them."""
        left = ", ".join(
            sorted(spec.name for run, spec in self._specs.items() if run not in self._asked)
        )
        return f"Not stopped, and so they go on in the cluster: {left}" if left else ""

    def kill(self) -> None:
        """Let go of all runs: the cluster ends those that were stopped, after their grace time."""
        self._is_left = True
        if left := self.abandon():
            say(f"{left}; `kubetune sweep stop FOLDER` tries again")

    def wait(self) -> None:
        """Wait for a moment."""
        time.sleep(_LOOK_SECONDS)


def _done(future: Future[None], work: Callable[[], None]) -> None:
    try:
        work()
        future.set_result(None)
    except BaseException as error:
        future.set_exception(error)


def stop_all(cluster: Cluster, name: str) -> list[str]:
    """Stop all runs of a sweep that go on, without its driver; their names. EnvironmentFault for what cannot be."""
    stopped, problems = [], []
    for found in list_runs(cluster):
        spec = find_run(cluster, found)
        is_ours = spec.kubernetes.labels.get(SWEEP_LABEL) == name
        workload = cluster.get(workload_kind(spec), found) if is_ours else None
        if workload is not None and pods.state_of(workload, [])[0] in ("waiting", "running"):
            try:
                stop(cluster, spec)
                stopped.append(found)
            except errors.KubetuneError as error:
                problems.append(f"{found}: {error}")
    if problems:
        raise EnvironmentFault(
            "\n".join([*problems, f"Stopped were: {', '.join(stopped) or 'none'}."])
        )
    return stopped


def _shared(config: Config) -> list[tuple[str, VolumeConfig]]:
    assert config.kubernetes is not None
    storage = config.kubernetes.storage
    volumes = (("cache", storage.cache), ("outputs", storage.outputs))
    return [
        (name, volume)
        for name, volume in volumes
        if volume.size and volume.access == "ReadWriteMany"
    ]


def _status(seen: ObservedRun, spec: RunSpec) -> ExitStatus | None:
    """The end of a run's last start; None while it goes on, or waits."""
    if seen.state in ("waiting", "running"):
        return None
    if seen.state == "stopped":
        return ExitStatus(errors.PREEMPTED, seen.reason or "it was stopped")
    if seen.state == "absent":
        return ExitStatus(errors.LOST_PEER, "its workload was deleted")
    ended = [
        told for pod in seen.pods if pods.node_number(pod) == 0 and (told := pods.message_of(pod))
    ]
    # A pod that has just written how it ends may not have ended yet.
    ended += [told] if not ended and (told := exit_status_in(seen.progress)) else []
    if seen.state == "done":
        paused = (
            "Paused" if spec.config.training.pause_at_step else None
        )  # its pods are gone: what else could it be
        told = ended[-1] if ended else {"reason": seen.reason or "done", "error": paused}
        return ExitStatus(errors.OK, str(told["reason"]), told.get("step"), told.get("error"))
    return _failure(seen)


def _failure(seen: ObservedRun) -> ExitStatus:
    """The end of a run that has failed: that of the pod which is the cause, not of those that lost it by that."""
    guilty = pods.culprit(seen.pods)
    word = None if guilty is None else pods.message_of(guilty)
    if guilty is not None and word is not None:
        code = pods.exit_code(guilty) or errors.BUG
        return ExitStatus(code, str(word["reason"]), word.get("step"), word.get("error"))
    cause = seen.cause or {}
    return ExitStatus(
        cause.get("code") or errors.BUG, cause.get("reason") or seen.reason or "it failed"
    )


def _held(pod: Object) -> float:
    """Seconds that a pod's trainer has run."""
    state = pods.trainer_status(pod).get("state") or {}
    span = state.get("terminated") or state.get("running") or {}
    if not (began := span.get("startedAt")):
        return 0.0
    ended = span.get("finishedAt")
    until = datetime.fromisoformat(ended) if ended else datetime.now(UTC)
    return max(0.0, (until - datetime.fromisoformat(began)).total_seconds())
