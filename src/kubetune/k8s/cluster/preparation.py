"""The pods that fetch and prepare before training: their state, and why training has not begun.

A JobSet and a TrainJob start the trainer after them by themselves. For the other kinds `submit` waits for a Job.
"""

from __future__ import annotations

from collections.abc import Sequence

from kubetune.k8s.api.api_errors import ApiError
from kubetune.k8s.api.client import Cluster, Object
from kubetune.k8s.cluster import pods
from kubetune.k8s.manifests.initialisers import PREPROCESS, preprocess_name
from kubetune.k8s.manifests.kinds.kind import State
from kubetune.k8s.manifests.kinds.registry import kind_of
from kubetune.k8s.manifests.run_spec import RunSpec

TAIL_LINES = 20


def has_own_job(spec: RunSpec) -> bool:
    """True if a Job of its own prepares this run."""
    return spec.prepares and not kind_of(spec.kubernetes.kind).starts_in_order


def find_job(cluster: Cluster, spec: RunSpec) -> Object | None:
    """Return the Job that prepares this run; None where its kind prepares, or the Job does not exist."""
    if not has_own_job(spec):
        return None
    return cluster.get("Job", preprocess_name(spec))


def find_pods(cluster: Cluster, spec: RunSpec) -> list[Object]:
    """Return the pods that prepare, older ones first."""
    if not spec.prepares:
        return []
    preparing = cluster.list("Pod", spec.selector(PREPROCESS))
    return sorted(preparing, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))


def state_before_training(
    cluster: Cluster, spec: RunSpec, state: State, preparing: Sequence[Object]
) -> tuple[State, str]:
    """Return the state of a run without a pod of the trainer, and why it has none.

    `state` is the workload's: `absent`, `waiting` or `failed`.

        workload   pods that prepare        state, reason
        absent     one runs                 waiting, "fit-preprocess-x fetches and prepares first; training begins …"
        absent     the Job failed           failed, the last line of its log
        waiting    one finds no node        waiting, "no node fits: …"
        failed     one failed               failed, the last line of its log
    """
    if state == "failed":
        # A JobSet and a TrainJob that failed say how often they began again, not why.
        failed = [pod for pod in preparing if pods.failed_container(pod)]
        if not failed:
            return state, ""
        return state, cause_of_failure(cluster, failed[-1])
    problem = ""
    activity = ""
    for pod in preparing:
        if not pods.has_ended(pod):
            problem = pods.why(pod)
            activity = f"{pods.name_of(pod)} fetches and prepares first"
    if state == "waiting" or kind_of(spec.kubernetes.kind).starts_in_order:
        return state, problem or activity
    job = find_job(cluster, spec)
    state, reason = pods.state_of(job, preparing)
    if state == "failed":
        if preparing:
            reason = cause_of_failure(cluster, preparing[-1]) or reason
        return "failed", reason
    if state in ("absent", "done"):
        return "absent", ""
    activity = activity or f"Job {preprocess_name(spec)} waits"
    return (
        "waiting",
        problem or f"{activity}; training begins when kubetune submit has seen it end",
    )


def cause_of_failure(cluster: Cluster, pod: Object) -> str:
    """Return the last line of the container that failed, else what Kubernetes says of it."""
    container = pods.failed_container(pod)
    last_text = ""
    if container is not None:
        try:
            for line in cluster.log(pods.name_of(pod), container, tail=TAIL_LINES):
                # A line begins with its time.
                last_text = line.partition(" ")[2].strip() or last_text
        except ApiError:
            # A log that is cut off does not say how it ends.
            last_text = ""
    if not last_text:
        return pods.why(pod)
    return last_text.removeprefix("kubetune: ")
