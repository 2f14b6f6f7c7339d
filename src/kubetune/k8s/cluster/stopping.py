"""Runs on a cluster stopped, resumed and removed, with the Jobs beside their workload."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kubetune.errors import ConfigError, EnvironmentFault
from kubetune.k8s.api.api_errors import Refused
from kubetune.k8s.api.client import Cluster, Object
from kubetune.k8s.api.informer import Informer
from kubetune.k8s.api.kinds import KINDS
from kubetune.k8s.cluster import kueue, pods
from kubetune.k8s.cluster.cluster_runs import FILES
from kubetune.k8s.cluster.hosts import LostHost, lost_hosts
from kubetune.k8s.cluster.run_lookup import workload_kind
from kubetune.k8s.cluster.submission import JOB
from kubetune.k8s.cluster.termination import note_progress
from kubetune.k8s.manifests import render
from kubetune.k8s.manifests.extra_objects import token_secret, token_servers
from kubetune.k8s.manifests.kinds.registry import kind_of
from kubetune.k8s.manifests.run_spec import (
    MARGIN_SECONDS,
    TRAINER,
    Manifest,
    RunSpec,
    plan_without_data,
)
from kubetune.k8s.manifests.samplers import SAMPLER

VOLUMES = "PersistentVolumeClaim"
# Kinds of objects that users of a namespace often may not read.
_GUARDED_GROUPS = ("rbac.authorization.k8s.io", "networking.k8s.io")
LOOK_SECONDS = 0.5
# Between two looks at the nodes of pods that should go.
_HOSTS_SECONDS = 10.0


def start_beside(
    cluster: Cluster, spec: RunSpec, job: Manifest, apply: Callable[[Manifest], object]
) -> None:
    """Start a Job beside the workload, or let it go on. One that has ended is made anew."""
    name = job["metadata"]["name"]
    existing = cluster.get(JOB, name)
    if existing is not None:
        state, _ = pods.state_of(existing, [])
        if state in ("done", "failed"):
            cluster.delete(JOB, name)
            wait_gone(cluster, spec, JOB, name, components=(SAMPLER,))
        elif state == "stopped":
            cluster.merge(JOB, name, {"spec": {"suspend": False}})
    apply(job)


def wait_gone(
    cluster: Cluster,
    spec: RunSpec,
    kind: str | None = None,
    name: str | None = None,
    *,
    components: Sequence[str] = (TRAINER, SAMPLER),
) -> None:
    """Wait until no pod of these is left, nor, with `kind`, the workload. Raise EnvironmentFault when they stay.

    Without `kind` the workload stays, and with it pods that have ended, which hold no node: a stopped Job keeps them.
    """
    name = name or spec.name
    departure = Departure(cluster, spec)
    with Informer(cluster, "Pod", spec.every_pod()) as informer:
        while True:
            left = []
            for pod in informer.objects():
                may_stay = kind is None and pods.has_ended(pod)
                if pods.component_of(pod) in components and not may_stay:
                    left.append(pod)
            if not left and (kind is None or cluster.get(kind, name) is None):
                return
            departure.look(left, f"{kind} {name}")
            # Ends at once when a pod goes; else looks again, for the workload may go last.
            if informer.changed.wait(LOOK_SECONDS):
                informer.changed.clear()


class Departure:
    """The time that pods have to save and go. Tells of lost hosts, whose pods cannot."""

    def __init__(self, cluster: Cluster, spec: RunSpec) -> None:
        self._cluster = cluster
        self._spec = spec
        # Pods may save for as long as their grace period; the margin is for kubelet and controllers.
        self._patience = spec.kubernetes.grace_seconds + 2 * MARGIN_SECONDS
        self._began = time.monotonic()
        self._next_look = self._began + _HOSTS_SECONDS

    def look(self, left: Sequence[Object], rest: str = "") -> None:
        """Raise EnvironmentFault where these pods, or the `rest` of the run, stay for too long."""
        now = time.monotonic()
        is_late = now > self._began + self._patience
        hosts: list[LostHost] = []
        # Each node is a request.
        if is_late or now > self._next_look:
            self._next_look = now + _HOSTS_SECONDS
            hosts = lost_hosts(self._cluster, left)
        for host in hosts:
            self._cluster.tell_once(host.advice())
        if not is_late:
            return
        names = ", ".join(pods.name_of(pod) for pod in left) or rest
        why = f"look at kubetune events {self._spec.typed}"
        if hosts:
            why = hosts[0].advice()
        raise EnvironmentFault(f"{names} did not go within {self._patience} s; {why}")

    def look_at_all(self, all_pods: Sequence[Object]) -> None:
        """Do the same with the pods that train or draw, of all pods of a run."""
        left = []
        for pod in all_pods:
            if pods.component_of(pod) in (TRAINER, SAMPLER) and not pods.has_ended(pod):
                left.append(pod)
        if left:
            self.look(left)


def stop(cluster: Cluster, spec: RunSpec) -> None:
    """Ask all pods to save and end; `resume` lets the run go on. Raise ConfigError where it does not run."""
    workload = _present(cluster, spec)
    state, _ = pods.state_of(workload, [])
    if state == "done":
        raise ConfigError(f"{spec.name} is not running: it is done")
    if state == "failed":
        raise ConfigError(f"{spec.name} is not running: it has failed")
    _suspend(cluster, spec, workload, suspend=True)


def resume(cluster: Cluster, spec: RunSpec) -> None:
    """Let a stopped run go on from its newest checkpoint. Raise ConfigError where it is not stopped."""
    workload = _present(cluster, spec)
    state, _ = pods.state_of(workload, [])
    if state == "failed":
        raise ConfigError(
            f"{spec.name} has failed; fix the cause and submit it again, it goes on where it was"
        )
    if state == "done":
        raise ConfigError(f"{spec.name} is not stopped: it is done")
    if state != "stopped":
        raise ConfigError(f"{spec.name} is not stopped: it is running")
    _suspend(cluster, spec, workload, suspend=False)
    note_progress(cluster, spec, None)


def _present(cluster: Cluster, spec: RunSpec) -> Object:
    """Return the workload of a run. Raise ConfigError where it was deleted."""
    workload = cluster.get(workload_kind(spec), spec.name)
    if workload is None:
        raise ConfigError(
            f"{spec.name} has no {workload_kind(spec)} any more; submit it again to go on with it"
        )
    return workload


def _suspend(cluster: Cluster, spec: RunSpec, workload: Object, *, suspend: bool) -> None:
    """Take all pods of a run away, or let them come back."""
    # Kueue restarts what is only suspended, so its own object must change too.
    kind = kind_of(spec.kubernetes.kind)
    is_queued = bool(pods.queue_of(workload)) and kind.is_suspended_by_kueue
    if is_queued and kueue.is_installed(cluster) and kueue.looks_after(cluster, workload):
        kueue.activate(cluster, workload, active=not suspend)
        return
    beside = kind.beside(spec)
    if not suspend:
        # Before the trainer, which asks them.
        for obj in _rendered(spec):
            if obj["kind"] == JOB and obj["metadata"]["name"] in beside:
                start_beside(cluster, spec, obj, cluster.apply)
    change = kind.suspension(spec.nodes, suspend=suspend)
    if is_queued:
        # Else it would look like one that waits.
        change |= pods.stopped_note(stopped=suspend)
    cluster.merge(kind.name, spec.name, change)
    if suspend:
        for name in beside:
            if cluster.get(JOB, name) is not None:
                cluster.merge(JOB, name, {"spec": {"suspend": True}})


def _rendered(spec: RunSpec) -> list[Manifest]:
    """Return the objects of a run that the cluster has the config of."""
    files = {f"/{name}": text for name, text in spec.files.items()}
    config = spec.config
    return render(config, plan_without_data(config), files)


def deletable(cluster: Cluster, spec: RunSpec, *, volumes: bool) -> list[Object]:
    """Return the objects of a run that exist, in the order to delete them: the workload first.

    Its volumes are among them only where asked for, since results lie there.
    """
    objects = _rendered(spec)
    for server in token_servers(spec):
        name, _ = token_secret(spec, server)
        objects.append(spec.manifest("v1", "Secret", name, server))

    # The ConfigMap goes last, since a run is found by it: a deletion that was interrupted can then be repeated.
    objects.reverse()

    def order(obj: Manifest) -> tuple[bool, bool]:
        is_needed_by_pods = obj["kind"] in ("ConfigMap", VOLUMES)
        return is_needed_by_pods, obj["metadata"]["name"] == spec.name

    objects.sort(key=order)

    existing: list[Object] = []
    if volumes:
        # A copy that was broken off may have left a pod, and a claim stays for as long as a pod has it.
        existing += cluster.list("Pod", spec.selector(FILES))
    for obj in objects:
        is_wanted = volumes or obj["kind"] != VOLUMES
        if is_wanted and _exists(cluster, obj):
            existing.append(obj)
    return existing


def _exists(cluster: Cluster, obj: Manifest) -> bool:
    """True if an object exists, or may exist where the user may not read it."""
    kind = obj["kind"]
    try:
        return cluster.get(kind, obj["metadata"]["name"]) is not None
    except Refused as error:
        # A user who may not read roles cannot have made one. Other objects may exist; deleting them will show it.
        if error.code == 403:
            return KINDS[kind].group not in _GUARDED_GROUPS
        raise


def delete(cluster: Cluster, spec: RunSpec, objects: Sequence[Object]) -> None:
    """Delete these objects of a run: the workload first, and the rest once its pods have saved and gone."""
    kind = workload_kind(spec)
    # Claims and ConfigMaps of pods that still save must not go before them.
    for obj in objects:
        if obj["kind"] == kind:
            cluster.delete(kind, obj["metadata"]["name"])
    wait_gone(cluster, spec, kind)

    for obj in objects:
        if obj["kind"] != kind:
            cluster.delete(obj["kind"], obj["metadata"]["name"])
