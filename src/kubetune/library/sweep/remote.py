"""Runs of a sweep on a cluster: submitted, stopped and resumed by the same functions as other runs.

A run ends by itself at its rung and frees its GPUs, even if no driver is there. Submitted again, it
continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING

from kubetune import errors
from kubetune.config.schema import Config
from kubetune.errors import ConfigError, EnvironmentFault
from kubetune.k8s.api.api_errors import Unreachable
from kubetune.k8s.api.client import say
from kubetune.k8s.cluster import pods
from kubetune.k8s.cluster.cluster_runs import observe
from kubetune.k8s.cluster.log_follow import wait_for_job
from kubetune.k8s.cluster.preparation import find_job, has_own_job
from kubetune.k8s.cluster.stopping import resume, stop
from kubetune.k8s.cluster.submit import submit
from kubetune.k8s.manifests import local_files
from kubetune.k8s.manifests.run_spec import spec_of
from kubetune.library.sweep.observed_trial import seconds_of, status_of
from kubetune.library.sweep.runner import Observation
from kubetune.library.sweep.sweep_record import Trial, TrialRun
from kubetune.library.sweep.trial_configs import Recipe
from kubetune.library.sweep.trials_there import config_there
from kubetune.rundir.exit_status import ExitStatus

if TYPE_CHECKING:
    from kubetune.k8s.api.client import Cluster
    from kubetune.k8s.manifests.run_spec import RunSpec

_WAIT_SECONDS = 2.0
_UNREACHABLE_SECONDS = 900.0  # long enough to replace a control plane


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

    def start(self, trial: Trial, run: TrialRun) -> None:
        """Submit a run, or continue it to its trial's next rung; leave it alone if it runs already."""
        # The spec is kept: it says what to look for on the cluster.
        config = config_there(self._recipe, trial, run)
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
            job = find_job(self._cluster, spec)
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
                seconds += seconds_of(pod)
        pauses = spec.config.training.pause_at_step is not None
        return Observation(
            status_of(observed, pauses=pauses),
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
