"""Runs of a sweep on a cluster: submitted, stopped and resumed by the same functions as other runs.

A run ends by itself at its rung and frees its GPUs, even if no driver is there. Submitted again, it
continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from kubetune import errors
from kubetune.config.schema import Config
from kubetune.config.schema.volumes import StorageConfig, VolumeConfig
from kubetune.errors import ConfigError, EnvironmentFault
from kubetune.k8s.api.api_errors import Unreachable
from kubetune.k8s.api.client import say
from kubetune.k8s.cluster import pods
from kubetune.k8s.cluster.cluster_runs import ObservedRun, exit_status_in, observe
from kubetune.k8s.cluster.log_follow import wait_for_job
from kubetune.k8s.cluster.preparation import has_own_job
from kubetune.k8s.cluster.run_lookup import find_run, list_runs, workload_kind
from kubetune.k8s.cluster.stopping import resume, stop
from kubetune.k8s.cluster.submission import spec_of
from kubetune.k8s.cluster.submit import submit
from kubetune.k8s.manifests import local_files
from kubetune.k8s.manifests.initialisers import preprocess_name
from kubetune.k8s.manifests.kinds.registry import KINDS, kind_of
from kubetune.k8s.manifests.run_spec import MANAGED_BY, Manifest, plan_without_data
from kubetune.k8s.manifests.storage import claim_spec
from kubetune.k8s.run_names import on_volume
from kubetune.library.clusters import checked_manifests
from kubetune.library.plans import make_plan
from kubetune.library.sweep.runner import Observation
from kubetune.library.sweep.sweep_record import Trial, TrialRun
from kubetune.library.sweep.trial_configs import Recipe
from kubetune.plan.plan import Plan
from kubetune.rundir.exit_status import ExitStatus

if TYPE_CHECKING:
    from kubetune.k8s.api.client import Cluster, Object
    from kubetune.k8s.manifests.run_spec import RunSpec

# Labels of all objects of a trial's run, by which `sweep stop` finds them.
SWEEP_LABEL = "kubetune/sweep"
TRIAL_LABEL = "kubetune/trial"
_WAIT_SECONDS = 2.0
_UNREACHABLE_SECONDS = 900.0  # long enough to replace a control plane


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


class ClusterRunner:
    """Runs trials on a cluster, `slots` at once."""

    def __init__(self, recipe: Recipe, cluster: Cluster, slots: int) -> None:
        self.slots = slots
        self._recipe = recipe
        self._cluster = cluster
        self._specs: dict[str, RunSpec] = {}  # of the runs that have not ended, by run name
        self._stopped: set[str] = set()  # names of runs that were asked to stop
        self._preparing: dict[str, Future[None]] = {}  # submissions that wait for a Job
        self._messages: set[str] = set()  # what was printed, so that it is printed once
        self._was_killed = False
        self._unreachable_since: float | None = None
        self._next_try = 0.0  # when to ask an API server again that did not answer

    def config(self, trial: Trial, run: TrialRun) -> Config:
        """Return a run's config to submit: with labels, with shared volumes, to pause at its rung."""
        config = self._recipe.config(trial, run)
        kubernetes = config.kubernetes
        assert kubernetes is not None

        # In place of volumes of its own, a run mounts those of `make_claims`.
        volumes = {}
        for volume_name in _shared(kubernetes.storage):
            volumes[volume_name] = VolumeConfig(claim=f"{self._recipe.name}-{volume_name}")
        labels = {
            **kubernetes.labels,
            SWEEP_LABEL: self._recipe.name,
            TRIAL_LABEL: str(trial.number),
        }
        storage = kubernetes.storage.model_copy(update=volumes)
        kubernetes = kubernetes.model_copy(update={"labels": labels, "storage": storage})
        config = config.model_copy(update={"kubernetes": kubernetes, "output": None})

        # What the trial costs, and where it pauses, follows from its own values: a batch size is one of them.
        plan = plan_there(config)
        run.steps = plan.num_steps or run.steps
        run.devices = plan.world_size
        if not self._recipe.search.rungs:
            return config
        training = self._recipe.pausing(config.training, plan, trial)
        return config.model_copy(update={"training": training})

    def start(self, trial: Trial, run: TrialRun) -> None:
        """Submit a run, or continue it to its trial's next rung; leave it alone if it runs already."""
        # The spec is kept: it says what to look for on the cluster.
        config = self.config(trial, run)
        files = local_files(config)
        spec = spec_of(config, files).in_namespace(self._cluster.namespace)
        self._specs[run.name] = spec
        self._stopped.discard(run.name)
        if not has_own_job(spec):
            self._submit(config, files, run)
            return

        # A Job may prepare the run for hours. In a thread, since the driver observes other runs.
        submission: Future[None] = Future()
        self._preparing[run.name] = submission
        work = partial(self._submit, config, files, run)
        Thread(target=_complete, args=(submission, work), daemon=True).start()

    def _submit(self, config: Config, files: dict[str, str], run: TrialRun) -> None:
        """Submit a run; resume it if it is on the cluster already, and stopped."""
        job = submit(
            self._cluster,
            config,
            files,
            confirm=lambda question: True,
            wait=partial(self._wait_for_preparation, run),
        )
        if job.outcome == "unchanged":
            if job.state != "stopped":
                return
            resume(self._cluster, self._specs[run.name])
        # Its pods are new ones, whose seconds count from 0.
        run.earlier_seconds = run.seconds

    def _wait_for_preparation(self, run: TrialRun, spec: RunSpec) -> None:
        """Wait for the Job that prepares a run. Raise Preempted if the run is to stop meanwhile."""
        while True:
            job = self._cluster.get("Job", preprocess_name(spec))
            state, _ = pods.state_of(job, [])
            if state not in ("waiting", "running"):
                break
            if run.name in self._stopped:
                raise errors.Preempted(0)
            time.sleep(_WAIT_SECONDS)
        wait_for_job(self._cluster, spec, lambda source, text: None)

    def observe(self, run: TrialRun) -> Observation:
        """Return the run as its workload and pods show it.

        Raise EnvironmentFault only if the API server does not answer for long.
        """
        # The driver ends only when no run goes on, so runs that are left to the cluster count as stopped.
        if self._was_killed:
            return Observation(ExitStatus(errors.PREEMPTED, "left to the cluster"))
        if time.monotonic() < self._next_try:
            return Observation(None)

        try:
            seen = self._ask_cluster(run)
        except EnvironmentFault as fault:
            # One message, and one try in a while: a driver may observe many runs.
            now = time.monotonic()
            self._unreachable_since = self._unreachable_since or now
            if now - self._unreachable_since >= _UNREACHABLE_SECONDS:
                raise
            self._say_once(
                f"{fault}; runs continue in the cluster. Trying again for "
                f"{_UNREACHABLE_SECONDS:.0f} s"
            )
            self._next_try = now + _WAIT_SECONDS
            return Observation(None)

        self._unreachable_since = None
        if seen.status is not None:
            self._specs.pop(run.name)
        return seen

    def _ask_cluster(self, run: TrialRun) -> Observation:
        """Return the run as the API server knows it, or how its submission failed."""
        # A run that a Job prepares has no workload yet.
        if run.name in self._preparing:
            submission = self._preparing[run.name]
            if not submission.done():
                return Observation(None)
            del self._preparing[run.name]
            try:
                submission.result()
            except errors.KubetuneError as error:
                # A run that lost a peer is submitted again, which a server that did not answer is worth too.
                code = error.exit_code
                if isinstance(error, Unreachable):
                    code = errors.LOST_PEER
                return Observation(ExitStatus(code, str(error)))

        spec = self._specs[run.name]
        observed = observe(self._cluster, spec)
        progress = observed.progress or {}
        best = progress.get("best") or {}
        # Node 0 stands for all nodes, which are held as long.
        seconds = run.earlier_seconds
        for pod in observed.pods:
            if pods.node_number(pod) == 0:
                seconds += _seconds_of(pod)
        pauses = spec.config.training.pause_at_step is not None
        return Observation(
            _status(observed, pauses=pauses),
            progress.get("step"),
            progress.get("steps"),
            best.get("value"),
            seconds,
        )

    def stop(self, run: TrialRun) -> None:
        """Ask a run to save and end, once; it stays on the cluster, and `start` resumes it."""
        if run.name in self._stopped:
            return
        # The thread that waits for a run's Job looks at `_stopped` itself.
        if run.name not in self._preparing:
            try:
                stop(self._cluster, self._specs[run.name])
            except ConfigError:
                pass  # it has ended meanwhile
            except EnvironmentFault as fault:
                # Such as a queue that does not know it yet. The driver asks again in a moment.
                self._say_once(str(fault))
                return
        self._stopped.add(run.name)

    def _say_once(self, text: str) -> None:
        """Print a message, unless it was printed before."""
        if text not in self._messages:
            self._messages.add(text)
            say(text)

    def abandon(self) -> str:
        """Return a sentence on what happens to the runs if the driver ends without them."""
        names = [spec.name for run, spec in self._specs.items() if run not in self._stopped]
        if not names:
            return ""
        return (
            f"These runs were not stopped and continue in the cluster: {', '.join(sorted(names))}"
        )

    def kill(self) -> None:
        """Leave all runs alone: the cluster ends those that were stopped, after their grace time."""
        self._was_killed = True
        sentence = self.abandon()
        if sentence:
            say(f"{sentence}; `kubetune sweep stop FOLDER` tries again")

    def wait(self) -> None:
        """Wait for a moment."""
        time.sleep(_WAIT_SECONDS)


def _complete(future: Future[None], work: Callable[[], None]) -> None:
    """Do the work, and hand its end or its error to the future."""
    try:
        work()
        future.set_result(None)
    except BaseException as error:
        future.set_exception(error)


def stop_all(cluster: Cluster, name: str) -> list[str]:
    """Stop all runs of a sweep without its driver. Return their names.

    Raise EnvironmentFault if a run could not be stopped.
    """
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


def _shared(storage: StorageConfig) -> dict[str, VolumeConfig]:
    """Return the volumes that kubetune makes and that several pods may mount, by name."""
    volumes = {"cache": storage.cache, "outputs": storage.outputs}
    shared = {}
    for name, volume in volumes.items():
        if volume.size and volume.access == "ReadWriteMany":
            shared[name] = volume
    return shared


def _status(observed: ObservedRun, *, pauses: bool) -> ExitStatus | None:
    """Return how a run's last start ended; None while it waits or runs.

    `pauses` is True if it is to pause at its rung.
    """
    if observed.state in ("waiting", "running"):
        return None
    if observed.state == "stopped":
        return ExitStatus(errors.PREEMPTED, observed.reason or "it was stopped")
    if observed.state == "absent":
        return ExitStatus(errors.LOST_PEER, "its workload was deleted")
    if observed.state != "done":
        return _failure(observed)

    # If its pods are gone, nothing says whether it paused or was done; it was to pause.
    message: Mapping[str, Any] = {
        "reason": observed.reason or "done",
        "error": "Paused" if pauses else None,
    }
    # A pod that has just written how it ends may not have ended yet, and shows it as progress.
    message = exit_status_in(observed.progress) or message
    for pod in observed.pods:
        if pods.node_number(pod) == 0:
            message = pods.message_of(pod) or message
    reason = str(message["reason"])
    return ExitStatus(errors.OK, reason, message.get("step"), message.get("error"))


def _failure(observed: ObservedRun) -> ExitStatus:
    """Return how a run failed, as the pod says that failed first. The others only lost their peer."""
    culprit = pods.culprit(observed.pods)
    if culprit is not None:
        message = pods.message_of(culprit)
        if message is not None:
            code = pods.exit_code(culprit) or errors.BUG
            reason = str(message["reason"])
            return ExitStatus(code, reason, message.get("step"), message.get("error"))

    # The pods are gone, or say nothing: events of the cluster may.
    cause = observed.cause or {}
    reason = cause.get("reason") or observed.reason or "it failed"
    return ExitStatus(cause.get("code") or errors.BUG, reason)


def _seconds_of(pod: Object) -> float:
    """Return the seconds for which a pod's trainer has run."""
    state = pods.trainer_status(pod).get("state") or {}
    span = state.get("terminated") or state.get("running") or {}
    started = span.get("startedAt")
    if not started:
        return 0.0
    ended = datetime.now(UTC)
    if span.get("finishedAt"):
        ended = datetime.fromisoformat(span["finishedAt"])
    return max(0.0, (ended - datetime.fromisoformat(started)).total_seconds())
