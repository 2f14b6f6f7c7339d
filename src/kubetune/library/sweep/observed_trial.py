"""A trial's run on a cluster as its workload and pods show it: how it ended, and how long it has run."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from kubetune import errors
from kubetune.k8s.cluster import pods
from kubetune.k8s.cluster.cluster_runs import ObservedRun, exit_status_in
from kubetune.rundir.exit_status import ExitStatus

if TYPE_CHECKING:
    from kubetune.k8s.api.client import Object


def status_of(observed: ObservedRun, *, pauses: bool) -> ExitStatus | None:
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


def seconds_of(pod: Object) -> float:
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
