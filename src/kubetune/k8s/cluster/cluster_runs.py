"""Runs as the cluster knows them: their pods, and everything there is to know about one now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kubetune.errors import FINAL, OK
from kubetune.k8s.api.client import Cluster, Object
from kubetune.k8s.cluster import kueue, pods, preparation
from kubetune.k8s.cluster.asking_pods import PodContainer, ask_progress
from kubetune.k8s.cluster.causes import find_cause
from kubetune.k8s.cluster.hosts import LostHost, lost_hosts
from kubetune.k8s.cluster.run_events import events_of
from kubetune.k8s.cluster.run_lookup import workload_kind
from kubetune.k8s.cluster.termination import left_progress, logged_progress, noted_progress
from kubetune.k8s.manifests.extra_objects import server_components
from kubetune.k8s.manifests.kinds.kind import State
from kubetune.k8s.manifests.run_spec import TRAINER, RunSpec
from kubetune.k8s.manifests.samplers import SAMPLER
from kubetune.rundir.exit_status import ExitStatus

# Component of the pods that read the outputs volume where no other does.
FILES = "files"


# Exit codes after which no other start follows.
_FINAL = (OK, *FINAL)


@dataclass(frozen=True)
class ObservedRun:
    """A run at one moment."""

    spec: RunSpec
    workload: Object | None
    pods: list[Object]  # of the trainer, by node and age
    events: list[Object]  # oldest first
    state: State
    reason: str
    progress: dict[str, Any] | None  # in_pod's answer, or as much of it as is known without one
    # the pods that fetch and prepare: while there is no trainer, or where they are why there is none
    preparing: list[Object] = field(default_factory=list)
    silence: str = ""  # why pods that run could not be asked for progress
    cause: dict[str, Any] | None = None  # the pod by which the last start ended, see find_cause
    samplers: list[Object] = field(default_factory=list)  # pods that draw answers, by index and age
    lost_hosts: list[LostHost] = field(default_factory=list)  # that hold pods of the run
    # Pods of TensorBoard, the page and JupyterLab.
    servers: list[Object] = field(default_factory=list)


def trainer_pods(cluster: Cluster, spec: RunSpec) -> list[Object]:
    """Return the pods that train, by node, older ones first."""
    return _numbered_pods(cluster, spec, TRAINER)


def sampler_pods(cluster: Cluster, spec: RunSpec) -> list[Object]:
    """Return the pods that draw answers, by index, older ones first."""
    if spec.kubernetes.samplers is None:
        return []
    return _numbered_pods(cluster, spec, SAMPLER)


def server_pods(cluster: Cluster, spec: RunSpec) -> list[Object]:
    """Return the pods of the servers beside the run: TensorBoard, the page, JupyterLab."""
    pods = []
    for component in server_components(spec):
        pods.extend(cluster.list("Pod", spec.selector(component)))
    return pods


def _numbered_pods(cluster: Cluster, spec: RunSpec, component: str) -> list[Object]:
    def order(pod: Object) -> tuple[int, str]:
        return pods.node_number(pod), pod["metadata"].get("creationTimestamp", "")

    return sorted(cluster.list("Pod", spec.selector(component)), key=order)


def running(cluster: Cluster, spec: RunSpec) -> list[PodContainer]:
    """Return the trainer's running containers, by node."""
    targets = []
    for pod in trainer_pods(cluster, spec):
        if pods.is_running(pod):
            container = pods.trainer_container(pod)
            targets.append(PodContainer(pods.name_of(pod), container, pods.node_number(pod)))
    return targets


def observe(cluster: Cluster, spec: RunSpec) -> ObservedRun:
    """Return everything there is to know about a run now."""
    workload = cluster.get(workload_kind(spec), spec.name)
    trainers = trainer_pods(cluster, spec)
    state, reason = pods.state_of(workload, trainers)

    # While there is no trainer, the pods that prepare say what the run is doing.
    preparing: list[Object] = []
    if spec.prepares and not trainers and state in ("absent", "waiting", "failed"):
        preparing = preparation.find_pods(cluster, spec)
        state, cause = preparation.state_before_training(cluster, spec, state, preparing)
        reason = cause or reason
    if state == "waiting" and not reason:
        reason = kueue.why_waiting(cluster, workload)

    samplers = sampler_pods(cluster, spec)
    lost = lost_hosts(cluster, [*preparing, *trainers, *samplers])
    lost_names = {host.name for host in lost}
    # Each pod of a lost host would be waited for, and two of them would hide all others.
    heard = [pod for pod in trainers if pod["spec"].get("nodeName") not in lost_names]
    progress, silence = ask_progress(cluster, spec, heard)

    # Listed after the question, which takes a while: the newest events say why nobody answered.
    events = events_of(cluster, spec)
    status = final_status(workload, progress)
    if state == "running" and status and not is_left_behind(spec, status):
        # Without its error: a pause is "done", as a Job that pauses is.
        state = ExitStatus(status["code"], status["reason"]).state
        reason = status["reason"]

    # No pod can be asked: take a note, the last message of ended pods, or the log. A stopped Job keeps pods of earlier
    # starts, so what `stop` noted comes before what they left.
    if progress is None and state == "stopped":
        progress = noted_progress(cluster, spec)
    if progress is None and not silence:
        progress = left_progress(trainers)
    if progress is None and state != "stopped":
        progress = logged_progress(cluster, trainers)
    return ObservedRun(
        spec,
        workload,
        trainers,
        events,
        state,
        reason,
        progress,
        preparing,
        silence,
        find_cause(trainers, events),
        samplers,
        lost,
        server_pods(cluster, spec),
    )


def exit_status_in(progress: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the exit status in a run's progress, or None while it runs."""
    status: dict[str, Any] | None = (progress or {}).get("exit_status")
    return status


def final_status(workload: Object | None, progress: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the exit status of a run that has ended while its pods go on; None where another start follows.

    Pods go on in a StatefulSet, in `dev`, where they idle, and in all other kinds for a moment.
    """
    status = exit_status_in(progress)
    if status is None:
        return None
    is_over = status["code"] in _FINAL or (workload is not None and pods.is_idling(workload))
    if not is_over:
        return None
    return status


def is_left_behind(spec: RunSpec, status: Mapping[str, Any]) -> bool:
    """True if an exit status is the pause of the start before, which this start has not cleared yet.

    With `pause_at_step` raised from 10 to 20, a pause at step 10 is such a one.
    """
    if status.get("error") != "Paused":
        return False
    pause = spec.config.training.pause_at_step
    return pause is None or (status.get("step") or 0) < pause
