"""Starts, stops and removes runs on a cluster. What is applied is what `render` makes, and nothing else.

A name belongs to one run, as a run directory does: another config of the same name is refused, unless it differs only
in what moves no number, and then the pods are replaced and go on from the newest checkpoint.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from kubetune.config import consent
from kubetune.config.load import dotted_values, load_resolved, resolved
from kubetune.config.schema import Config
from kubetune.errors import ConfigError, EnvironmentFault
from kubetune.k8s.api.api_errors import MissingRight, NoNamespace, Refused, missing_rights
from kubetune.k8s.api.client import Cluster, Object
from kubetune.k8s.api.informer import Informer
from kubetune.k8s.api.kinds import KINDS
from kubetune.k8s.cluster import kueue, pods, preparation
from kubetune.k8s.cluster.log_follow import wait_for_job
from kubetune.k8s.cluster.runs import FILES, read_run, workload_kind
from kubetune.k8s.cluster.termination import note_progress
from kubetune.k8s.manifests import render
from kubetune.k8s.manifests.configmap import pod_config
from kubetune.k8s.manifests.extras import token_secret, token_servers
from kubetune.k8s.manifests.initialisers import PREPROCESS, preprocess_name
from kubetune.k8s.manifests.kinds.kind import State
from kubetune.k8s.manifests.kinds.registry import kind_of
from kubetune.k8s.manifests.spec import (
    MANAGED_BY,
    MARGIN_SECONDS,
    TRAINER,
    Manifest,
    RunSpec,
    plan_without_data,
)
from kubetune.rundir.starts import dated, moved_numbers

Outcome = Literal["submitted", "unchanged", "replaced", "checked"]
Confirm = Callable[[str], bool]

_VOLUMES = "PersistentVolumeClaim"
_LOOK_SECONDS = 0.5
_GOING_SECONDS = 120.0


@dataclass(frozen=True)
class JobRef:
    """A run on a cluster, and what submitting it came to."""

    name: str
    namespace: str
    kind: str
    outcome: Outcome
    state: State


def spec_of(config: Config, files: Mapping[str, str] | None = None) -> RunSpec:
    """Return the facts that the manifests of a config are made from. `files` travel along, by their local path."""
    return RunSpec.of(config, plan_without_data(config), files)


def submit(
    cluster: Cluster,
    config: Config,
    files: Mapping[str, str],
    *,
    confirm: Confirm,
    dry_run: bool = False,
    change: Callable[[list[Manifest]], list[Manifest]] = lambda objects: objects,
    wait: Callable[[RunSpec], None] | None = None,
) -> JobRef:
    """Apply the objects of a run, after the server has accepted all of them in a dry run.

    Doing it twice changes nothing. `confirm` is asked, once, before pods that exist are replaced; `change` has the
    last word on the objects. Where a Job of its own prepares the run, `wait` is called to see it end well before the
    trainer is made; left out, it is waited for in silence. Raises ConfigError when the name belongs to another run or
    the answer was no, EnvironmentFault with everything the server refuses.
    """
    sent = [consent.of_sent_file(path) for path in files]
    consent.allow([*consent.effects_of(config), *sent])
    spec = spec_of(config, files)
    old = read_run(cluster, spec.name)
    data = dated(config.data, resolved(old.config) if old else None)
    config = config.model_copy(update={"data": data})
    spec = spec_of(config, files)
    objects = change(render(config, plan_without_data(config), files))
    kind = workload_kind(spec)
    _check_owner(cluster, spec, old)
    was = workload_kind(old) if old else kind
    workload = cluster.get(was, spec.name)
    state, _ = pods.state_of(workload, [])
    is_same = old is not None and resolved(old.config) == _as_seen(spec)
    replaces = workload is not None and (not is_same or state == "failed")
    # A workload in the way would be refused for its fixed fields, though it will be gone by then.
    preparing = preparation.find_job(cluster, spec)
    in_the_way = [(kind, spec.name)] * replaces + [("Job", preprocess_name(spec))] * (
        preparing is not None
    )
    _check(
        cluster,
        spec,
        [obj for obj in objects if (obj["kind"], obj["metadata"]["name"]) not in in_the_way],
    )
    if dry_run:
        return JobRef(spec.name, cluster.namespace, kind, "checked", state)
    if replaces:
        _replace(cluster, spec, was, state, confirm)
    _make_tokens(cluster, spec)
    trainer = [
        obj for obj in objects if (obj["kind"], obj["metadata"]["name"]) == (kind, spec.name)
    ]
    is_new = replaces or workload is None
    # What prepared a trainer that is there may be gone by now, and is needed no more.
    done = [preprocess_name(spec)] if not is_new and preparation.has_own_job(spec) else []
    if preparing is not None and (not is_same or pods.state_of(preparing, [])[0] == "failed"):
        _remove_job(cluster, spec)
    for obj in objects:
        if obj not in trainer and obj["metadata"]["name"] not in done:
            _apply(cluster, obj)
    if is_new and preparation.has_own_job(spec):
        (wait or partial(_wait_in_silence, cluster))(spec)
    for obj in trainer if is_new or not (is_same and state == "stopped") else ():
        cluster.apply(obj)
    outcome: Outcome = "replaced" if replaces else "submitted" if workload is None else "unchanged"
    return JobRef(
        spec.name,
        cluster.namespace,
        kind,
        outcome,
        "waiting" if replaces or workload is None else state,
    )


def _as_seen(spec: RunSpec) -> dict[str, Any]:
    """Return the whole config with the paths that its pods see."""
    return resolved(load_resolved(pod_config(spec)))


def _check_owner(cluster: Cluster, spec: RunSpec, old: RunSpec | None) -> None:
    """Raise ConfigError when another object of this kind, or another run, has the name."""
    if old is None:
        workload = cluster.get(workload_kind(spec), spec.name)
        if workload is not None and pods.labels_of(workload).get(MANAGED_BY) != "kubetune":
            raise ConfigError(
                f"name: {workload['kind']} {spec.name} in namespace {cluster.namespace} is none of kubetune's; choose "
                "another name. Nothing was changed."
            )
        return
    before = dict(dotted_values(resolved(old.config)))
    now = dict(dotted_values(_as_seen(spec)))
    changes = [f"{key} was {was}, now is {value}" for key, was, value in moved_numbers(before, now)]
    for local_path, pod_path in spec.carried().items():
        name = pod_path.rsplit("/", 1)[-1]
        text = spec.files[local_path]
        if old.files.get(name, text) != text:
            changes.append(f"{name}: its contents have changed")
    if changes:
        raise ConfigError(
            [
                *changes,
                f"name: {spec.name} in namespace {cluster.namespace} is a run with another config; to go on with it "
                "undo these changes, to start afresh choose another name. Nothing was changed.",
            ]
        )


def _check(cluster: Cluster, spec: RunSpec, objects: Sequence[Manifest]) -> None:
    """Raise EnvironmentFault with all that the server would refuse, and with missing Secrets and queues."""
    problems = _missing_secrets(cluster, spec)
    if spec.kubernetes.queue:
        missing_queue = kueue.missing_queue(cluster, spec.kubernetes.queue)
        if missing_queue:
            problems.append(missing_queue)
    rights: list[MissingRight] = []
    for obj in objects:
        try:
            cluster.apply(obj, dry_run=True)
        except NoNamespace as error:
            raise EnvironmentFault(f"{error}. Nothing was changed.") from None
        except MissingRight as error:
            rights.append(error)
        except Refused as error:
            problems.append(str(error))
    if rights:
        problems.append(missing_rights(rights))
    if problems:
        raise EnvironmentFault("\n".join([*dict.fromkeys(problems), "Nothing was changed."]))


def _missing_secrets(cluster: Cluster, spec: RunSpec) -> list[str]:
    problems = []
    for variable, reference in spec.kubernetes.secrets.items():
        try:
            secret = cluster.get("Secret", reference.secret)
        except Refused:
            # Users who may not read Secrets learn of a missing one from the pods.
            continue
        key = reference.key or variable
        if secret is None:
            missing = f"Secret {reference.secret} does not exist"
        elif key not in (secret.get("data") or {}):
            missing = f"Secret {reference.secret} has no key {key}"
        else:
            continue
        # The command reads another name or key from the run file.
        command = f"kubetune secret set {variable} RUN_FILE -n {cluster.namespace}"
        problems.append(f"kubernetes.secrets.{variable}: {missing}; make it: {command}")
    return problems


def _replace(cluster: Cluster, spec: RunSpec, kind: str, state: State, confirm: Confirm) -> None:
    standing = {"failed": "has failed", "done": "is done", "stopped": "is stopped"}.get(
        state, "is there already"
    )
    question = (
        f"{kind} {spec.name} in namespace {cluster.namespace} {standing}. Its pods are stopped (they save first), and "
        "new ones go on from the newest checkpoint. Replace it"
    )
    if not confirm(question):
        raise ConfigError(f"{kind} {spec.name} was left as it is. Nothing was changed.")
    cluster.delete(kind, spec.name)
    wait_gone(cluster, spec, kind)


def _remove_job(cluster: Cluster, spec: RunSpec) -> None:
    """Remove the Job that prepared this run before, since the spec of a Job cannot be changed."""
    name = preprocess_name(spec)
    cluster.delete("Job", name)
    wait_gone(cluster, spec, "Job", name, component=PREPROCESS)


def _apply(cluster: Cluster, obj: Manifest) -> None:
    """Apply an object. A bare pod that has ended is made anew."""
    name = obj["metadata"]["name"]
    if obj["kind"] == "Pod":
        pod = cluster.get("Pod", name)
        if pod is not None and pods.has_ended(pod):
            cluster.delete("Pod", name, grace_seconds=0)
    if obj["kind"] == _VOLUMES:
        _wait_until_new(cluster, name)
    cluster.apply(obj)


def _wait_until_new(cluster: Cluster, claim: str) -> None:
    """Wait while a claim of that name is being deleted, since what is applied to it would go with it."""
    deadline = time.monotonic() + _GOING_SECONDS
    while _is_being_deleted(cluster.get(_VOLUMES, claim)):
        if time.monotonic() > deadline:
            raise EnvironmentFault(
                f"claim {claim} is to be deleted, and pods that use it are still there: kubectl describe pvc {claim} "
                f"-n {cluster.namespace} names them. Submit again when it has gone"
            )
        cluster.tell_once(
            f"claim {claim} is being deleted; waiting until the pods that use it have gone"
        )
        time.sleep(_LOOK_SECONDS)


def _is_being_deleted(obj: Object | None) -> bool:
    return obj is not None and "deletionTimestamp" in obj["metadata"]


def _wait_in_silence(cluster: Cluster, spec: RunSpec) -> None:
    wait_for_job(cluster, spec, lambda source, text: None)


def _make_tokens(cluster: Cluster, spec: RunSpec) -> None:
    """Give each server that asks for a token a random one, once."""
    for server in token_servers(spec):
        name, key = token_secret(spec, server)
        token = {key: secrets.token_urlsafe(32)}
        try:
            cluster.create(
                spec.manifest("v1", "Secret", name, server, type="Opaque", stringData=token)
            )
        except Refused as error:
            if error.code != 409:
                raise


def wait_gone(
    cluster: Cluster,
    spec: RunSpec,
    kind: str | None = None,
    name: str | None = None,
    *,
    component: str = TRAINER,
) -> None:
    """Wait until no pod of a component is left (nor, with `kind`, the workload). EnvironmentFault when they stay."""
    name = name or spec.name
    patience = spec.kubernetes.grace_seconds + 2 * MARGIN_SECONDS
    with Informer(cluster, "Pod", spec.selector(component)) as left:
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if not left.objects() and (kind is None or cluster.get(kind, name) is None):
                return
            # Ends at once when a pod goes; else looks again, for the workload may go last.
            if left.changed.wait(_LOOK_SECONDS):
                left.changed.clear()
        names = ", ".join(pods.name_of(pod) for pod in left.objects()) or f"{kind} {name}"
    raise EnvironmentFault(
        f"{names} did not go within {patience} s; look at kubetune events {spec.typed}"
    )


def stop(cluster: Cluster, spec: RunSpec) -> None:
    """Ask all pods to save and end; `resume` lets the run go on. Raises ConfigError where that cannot be."""
    workload = _present(cluster, spec)
    state, _ = pods.state_of(workload, [])
    if state in ("done", "failed"):
        raise ConfigError(
            f"{spec.name} is not running: it {'is done' if state == 'done' else 'has failed'}"
        )
    _suspend(cluster, spec, workload, suspend=True)


def resume(cluster: Cluster, spec: RunSpec) -> None:
    """Let a stopped run go on from its newest checkpoint. Raises ConfigError where it is not stopped."""
    workload = _present(cluster, spec)
    state, _ = pods.state_of(workload, [])
    if state == "failed":
        raise ConfigError(
            f"{spec.name} has failed; mend the cause and submit it again, it goes on where it was"
        )
    if state != "stopped":
        raise ConfigError(
            f"{spec.name} is not stopped: {'it is done' if state == 'done' else 'it is running'}"
        )
    _suspend(cluster, spec, workload, suspend=False)
    note_progress(cluster, spec, None)


def _present(cluster: Cluster, spec: RunSpec) -> Object:
    workload = cluster.get(workload_kind(spec), spec.name)
    if workload is None:
        raise ConfigError(
            f"{spec.name} has no {workload_kind(spec)} any more; submit it again to go on with it"
        )
    return workload


def _suspend(cluster: Cluster, spec: RunSpec, workload: Object, *, suspend: bool) -> None:
    kind = kind_of(spec.kubernetes.kind)
    is_queued = bool(spec.kubernetes.queue) and kind.is_suspended_by_kueue
    if is_queued and kueue.is_installed(cluster):
        kueue.activate(cluster, workload, active=not suspend)
        return
    change = kind.suspension(spec.nodes, suspend=suspend)
    cluster.merge(kind.name, spec.name, change)


def deletable(cluster: Cluster, spec: RunSpec, *, volumes: bool) -> list[Object]:
    """The objects of a run that exist, workload first; its volumes only where asked for, since results lie there."""
    files = {f"/{name}": text for name, text in spec.files.items()}
    objects = render(spec.config, plan_without_data(spec.config), files)
    for server in token_servers(spec):
        objects.append(spec.manifest("v1", "Secret", token_secret(spec, server)[0], server))
    wanted = [obj for obj in reversed(objects) if volumes or obj["kind"] != _VOLUMES]
    # The ConfigMap is what the run is found by: last, so that a broken-off deletion can be taken up again.
    wanted.sort(
        key=lambda obj: (
            obj["kind"] in ("ConfigMap", _VOLUMES),
            obj["metadata"]["name"] == spec.name,
        )
    )
    # A copy that was broken off may have left one, and a claim stays for as long as a pod has it.
    readers = cluster.list("Pod", spec.selector(FILES)) if volumes else []
    return [*readers, *(obj for obj in wanted if _exists(cluster, obj))]


def _exists(cluster: Cluster, obj: Manifest) -> bool:
    try:
        return cluster.get(obj["kind"], obj["metadata"]["name"]) is not None
    except Refused as error:
        if error.code == 403:
            return KINDS[obj["kind"]].group not in (
                "rbac.authorization.k8s.io",
                "networking.k8s.io",
            )
        raise


def delete(cluster: Cluster, spec: RunSpec, objects: Sequence[Object]) -> None:
    """Delete these objects of a run: the workload first, and the rest once its pods have saved and gone."""
    kind = workload_kind(spec)
    for obj in objects:
        if obj["kind"] == kind:
            cluster.delete(kind, obj["metadata"]["name"])
    wait_gone(cluster, spec, kind)
    for obj in objects:
        if obj["kind"] != kind:
            cluster.delete(obj["kind"], obj["metadata"]["name"])
