"""The pods that fetch and prepare before training: how they stand, and waiting for it where the kind of a run cannot.

A JobSet and a TrainJob start the trainer after it by themselves. The Job of the other kinds is waited for by `submit`.
"""

from __future__ import annotations

from collections.abc import Sequence

from kubetune.k8s.api.api_errors import ApiError
from kubetune.k8s.api.client import Cluster, Object
from kubetune.k8s.cluster import pods
from kubetune.k8s.manifests.initialisers import PREPROCESS, preprocess_name
from kubetune.k8s.manifests.kinds.kind import State
from kubetune.k8s.manifests.kinds.registry import kind_of
from kubetune.k8s.manifests.spec import RunSpec

TAIL_LINES = 20


def has_own_job(spec: RunSpec) -> bool:
    """A Job of its own prepares this run."""
    return spec.prepares and not kind_of(spec.kubernetes.kind).starts_in_order


def find_job(cluster: Cluster, spec: RunSpec) -> Object | None:
    """The Job that prepares this run, where it is one of its own and there."""
    return cluster.get("Job", preprocess_name(spec)) if has_own_job(spec) else None


def find_pods(cluster: Cluster, spec: RunSpec) -> list[Object]:
    """The pods that prepare, older ones first."""
    found = cluster.list("Pod", spec.selector(PREPROCESS)) if spec.prepares else []
    return sorted(found, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))


def standing(
    cluster: Cluster, spec: RunSpec, state: State, found: Sequence[Object]
) -> tuple[State, str]:
    """State of a run without a pod of the trainer, and why.

    `state` is what its workload says, `absent`, `waiting` or `failed`; `found` are the pods that prepare. A JobSet and
    a TrainJob that failed say how often they began again, not what for.
    """
    if state == "failed":
        failed = [pod for pod in found if pods.failed_container(pod)]
        return state, cause_of_failure(cluster, failed[-1]) if failed else ""
    active = [pod for pod in found if not pods.has_ended(pod)]
    doing = f"{pods.name_of(active[-1])} fetches and prepares first" if active else ""
    if state == "waiting" or kind_of(spec.kubernetes.kind).starts_in_order:
        return state, (pods.why(active[-1]) if active else "") or doing
    job = find_job(cluster, spec)
    state, reason = pods.state_of(job, found)
    if state == "failed":
        return "failed", (found and cause_of_failure(cluster, found[-1])) or reason
    if state in ("absent", "done"):
        return "absent", ""
    waits = f"{doing or f'Job {preprocess_name(spec)} waits'}; training begins when kubetune submit has seen it end"
    return "waiting", (pods.why(active[-1]) if active else "") or waits


def cause_of_failure(cluster: Cluster, pod: Object) -> str:
    """The last line of the container that failed, else what Kubernetes says of it."""
    failed = pods.failed_container(pod)
    try:
        lines = [] if failed is None else cluster.log(pods.name_of(pod), failed, tail=TAIL_LINES)
        said = [text for line in lines if (text := line.partition(" ")[2].strip())]
    except ApiError:
        said = []
    return said[-1].removeprefix("kubetune: ") if said else pods.why(pod)
