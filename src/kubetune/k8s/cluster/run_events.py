"""Events of a cluster that are about a run."""

from __future__ import annotations

from collections.abc import Callable

from kubetune.k8s.api.client import Cluster, Object
from kubetune.k8s.cluster import pods
from kubetune.k8s.cluster.run_lookup import list_runs
from kubetune.k8s.manifests.run_spec import RunSpec


def concerns(cluster: Cluster, spec: RunSpec) -> Callable[[Object], bool]:
    """Return a test of events: whether one is about an object of the run, by its name or how its name begins.

    An earlier run of the same name is told apart by time: its events came before this run's ConfigMap was made.
    """
    is_ours = _belongs_to(cluster, spec)
    config_map = cluster.get("ConfigMap", spec.name) or {"metadata": {}}
    began = pods.to_seconds(str(config_map["metadata"].get("creationTimestamp", "")))

    def is_of_run(event: Object) -> bool:
        name = pods.about(event).get("name", "")
        return is_ours(name) and pods.to_seconds(pods.event_time(event)) >= began

    return is_of_run


def _belongs_to(cluster: Cluster, spec: RunSpec) -> Callable[[str], bool]:
    """Return a test of names: whether the object of that name is one of the run's.

    With runs `fit` and `fit-large`, the pod `fit-0-abc` is of `fit`, and `fit-large-0-xyz` is not.
    """
    longer_names = [name for name in list_runs(cluster) if name.startswith(f"{spec.name}-")]

    def is_of(run: str, name: str) -> bool:
        return name == run or name.startswith(f"{run}-")

    def is_ours(name: str) -> bool:
        return is_of(spec.name, name) and not any(is_of(longer, name) for longer in longer_names)

    return is_ours


def events_of(cluster: Cluster, spec: RunSpec) -> list[Object]:
    """Return the events about anything of the run, oldest first."""
    is_of_run = concerns(cluster, spec)
    events = [event for event in cluster.list("Event") if is_of_run(event)]
    return sorted(events, key=pods.event_time)
