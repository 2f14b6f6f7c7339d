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
from kubetune.config.resolved import dotted_values, load_resolved, resolved
from kubetune.config.schema import Config
from kubetune.errors import ConfigError, EnvironmentFault
from kubetune.k8s.api.api_errors import NoNamespace, Refused, missing_rights
from kubetune.k8s.api.client import Cluster, Object
from kubetune.k8s.api.informer import Informer
from kubetune.k8s.api.kinds import KINDS
from kubetune.k8s.cluster import kueue, pods, preparation
from kubetune.k8s.cluster.admission import Admission
from kubetune.k8s.cluster.cluster_runs import FILES
from kubetune.k8s.cluster.log_follow import wait_for_job
from kubetune.k8s.cluster.run_lookup import read_run, workload_kind
from kubetune.k8s.cluster.termination import note_progress
from kubetune.k8s.manifests import render
from kubetune.k8s.manifests.configmap import pod_config
from kubetune.k8s.manifests.extras import token_secret, token_servers
from kubetune.k8s.manifests.initialisers import PREPROCESS, preprocess_name
from kubetune.k8s.manifests.kinds.kind import State
from kubetune.k8s.manifests.kinds.registry import kind_of
from kubetune.k8s.manifests.samplers import SAMPLER
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
_JOB = "Job"
# Kinds of objects that users of a namespace often may not read.
_GUARDED_GROUPS = ("rbac.authorization.k8s.io", "networking.k8s.io")
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
    # Objects that the cluster could not check yet, since what they refer to is not there.
    unchecked: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Submission:
    """A run that is to be applied, beside what the cluster has of it."""

    spec: RunSpec
    objects: list[Manifest]
    kind: str  # of the new workload
    old_kind: str  # of the workload that exists; the same where there is none
    workload: Object | None  # that exists
    old_beside: list[str]  # Jobs that stop and end with that workload
    state: State  # of that workload
    is_same: bool  # the run exists with the same config
    preparing: Object | None  # Job that prepared the run before

    @property
    def replaces(self) -> bool:
        """True if a workload exists that has to go first: the fields of its pods cannot be changed."""
        return self.workload is not None and (not self.is_same or self.state == "failed")

    @property
    def makes_trainer(self) -> bool:
        """True if a trainer begins, so that the data has to be prepared before."""
        return self.replaces or self.workload is None

    @property
    def outcome(self) -> Outcome:
        """Return what came of it, for the user."""
        if self.replaces:
            return "replaced"
        if self.workload is None:
            return "submitted"
        return "unchanged"

    def is_trainer(self, obj: Manifest) -> bool:
        """True if an object is the new workload."""
        return (obj["kind"], obj["metadata"]["name"]) == (self.kind, self.spec.name)

    def is_beside(self, obj: Manifest) -> bool:
        """True if an object is a Job that starts, stops and ends with the new workload."""
        names = kind_of(self.spec.kubernetes.kind).beside(self.spec)
        return obj["kind"] == _JOB and obj["metadata"]["name"] in names

    def is_job(self, obj: Manifest) -> bool:
        """True if an object is the Job that prepares the run."""
        return (obj["kind"], obj["metadata"]["name"]) == (_JOB, preprocess_name(self.spec))


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

    Doing it twice changes nothing. What a submission makes that is refused half-way, or interrupted, is removed again;
    once the Job that prepares has begun, all stays. `confirm` is asked, once, before pods that exist are replaced;
    `change` has the last word on the objects. Where a Job of its own prepares the run, `wait` is called to see it end
    well before the trainer is made; left out, it is waited for in silence. Raise ConfigError when the name belongs to
    another run or the answer was no, EnvironmentFault with everything the server refuses.
    """
    # Before anything is asked of the cluster: files leave this machine.
    sent_files = [consent.of_sent_file(path) for path in files]
    consent.allow([*consent.effects_of(config), *sent_files])

    # Everything that can be refused is refused now, before anything is changed.
    submission = _compare(cluster, config, files, change)
    spec = submission.spec
    admission = Admission(cluster, submission.objects)
    _check(cluster, spec, admission, _to_check(submission))
    if dry_run:
        return JobRef(
            spec.name,
            cluster.namespace,
            submission.kind,
            "checked",
            submission.state,
            tuple(admission.unchecked),
        )

    with admission.taking_back(f"submit again, or remove it: kubetune delete {spec.typed}"):
        admission.try_waiting()
        if submission.replaces:
            _replace(cluster, submission, confirm)
        _make_tokens(admission, spec)
        _apply_all(cluster, submission, admission, wait or partial(_wait_in_silence, cluster))

    state: State = submission.state
    if submission.makes_trainer:
        state = "waiting"
    return JobRef(spec.name, cluster.namespace, submission.kind, submission.outcome, state)


def _compare(
    cluster: Cluster,
    config: Config,
    files: Mapping[str, str],
    change: Callable[[list[Manifest]], list[Manifest]],
) -> _Submission:
    """Return a run beside what the cluster has of it. Raise ConfigError when the name belongs to another run."""
    old = read_run(cluster, spec_of(config, files).name)
    old_config = None
    if old is not None:
        old_config = resolved(old.config)
    # A run keeps the date of its first start, which its prompts may show.
    config = config.model_copy(update={"data": dated(config.data, old_config)})
    spec = spec_of(config, files)

    objects = change(render(config, plan_without_data(config), files))
    _check_owner(cluster, spec, old)

    # An earlier submit may have used another kind, whose workload has the same name.
    kind = workload_kind(spec)
    old_kind = kind
    old_beside: list[str] = []
    if old is not None:
        old_kind = workload_kind(old)
        old_beside = kind_of(old.kubernetes.kind).beside(old)
    workload = cluster.get(old_kind, spec.name)
    state, _ = pods.state_of(workload, [])

    is_same = old_config is not None and old_config == _as_seen(spec)
    preparing = preparation.find_job(cluster, spec)
    return _Submission(
        spec=spec,
        objects=objects,
        kind=kind,
        old_kind=old_kind,
        workload=workload,
        old_beside=old_beside,
        state=state,
        is_same=is_same,
        preparing=preparing,
    )


def _to_check(submission: _Submission) -> list[Manifest]:
    """Return the objects to try in a dry run.

    Objects in whose way an old one is would be refused for their fixed fields, though the old one will be gone.
    """
    objects = submission.objects
    if submission.replaces:
        objects = [obj for obj in objects if not submission.is_trainer(obj)]
        objects = [obj for obj in objects if not submission.is_beside(obj)]
    if submission.preparing is not None:
        objects = [obj for obj in objects if not submission.is_job(obj)]
    return objects


def _apply_all(
    cluster: Cluster,
    submission: _Submission,
    admission: Admission,
    wait: Callable[[RunSpec], None],
) -> None:
    """Apply everything but the trainer, wait until the run is prepared, then apply the trainer."""
    spec = submission.spec
    has_job = preparation.has_own_job(spec)

    # A Job that has prepared another config, or failed, would be in the way of the new one.
    preparing = submission.preparing
    if preparing is not None:
        state, _ = pods.state_of(preparing, [])
        if state == "failed" or not submission.is_same:
            _remove_job(cluster, spec)

    for obj in submission.objects:
        # The Job that prepared a trainer that exists may be gone by now, and is needed no more.
        is_needless = has_job and not submission.makes_trainer and submission.is_job(obj)
        holds_gpus = submission.is_trainer(obj) or submission.is_beside(obj)
        if not holds_gpus and not is_needless:
            _apply(cluster, admission, obj)
    if has_job and submission.makes_trainer:
        # It may take hours, and goes on whatever becomes of this command.
        admission.keep()
        wait(spec)

    # To apply a stopped run's workload would start it.
    if submission.is_same and submission.state == "stopped" and not submission.makes_trainer:
        return
    for obj in submission.objects:
        if submission.is_beside(obj):
            _start_beside(cluster, spec, obj, admission.apply)
    for obj in submission.objects:
        if submission.is_trainer(obj):
            admission.apply(obj)


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

    # The run's own ConfigMap is compared, key by key, with what the pods would see now.
    before = dict(dotted_values(resolved(old.config)))
    now = dict(dotted_values(_as_seen(spec)))
    changes = []
    for key, was, value in moved_numbers(before, now):
        changes.append(f"{key} was {was}, now is {value}")

    # The ConfigMap knows a file that travels by its name alone.
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


def _check(
    cluster: Cluster, spec: RunSpec, admission: Admission, objects: Sequence[Manifest]
) -> None:
    """Raise EnvironmentFault with all that the server would refuse, and with missing Secrets and queues."""
    problems = _missing_secrets(cluster, spec)
    if spec.kubernetes.queue:
        missing_queue = kueue.missing_queue(cluster, spec.kubernetes.queue)
        if missing_queue:
            problems.append(missing_queue)

    try:
        rights, refused = admission.try_all(objects)
    except NoNamespace as error:
        raise EnvironmentFault(f"{error}. Nothing was changed.") from None
    problems += refused
    # Missing rights are listed together, as one request to whoever may grant them.
    if rights:
        problems.append(missing_rights(rights))
    if problems:
        raise EnvironmentFault("\n".join([*dict.fromkeys(problems), "Nothing was changed."]))


def _missing_secrets(cluster: Cluster, spec: RunSpec) -> list[str]:
    """Return a problem for each Secret, or key of one, that the config names and the namespace lacks."""
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


def _replace(cluster: Cluster, submission: _Submission, confirm: Confirm) -> None:
    """Remove a run's workload and wait until its pods have saved and gone. Raise ConfigError where the answer is no."""
    spec = submission.spec
    kind = submission.old_kind
    state = {"failed": "has failed", "done": "is done", "stopped": "is stopped"}.get(
        submission.state, "is there already"
    )
    question = (
        f"{kind} {spec.name} in namespace {cluster.namespace} {state}. Its pods are stopped (they save first), and "
        "new ones go on from the newest checkpoint. Replace it"
    )
    if not confirm(question):
        raise ConfigError(f"{kind} {spec.name} was left as it is. Nothing was changed.")
    cluster.delete(kind, spec.name)
    for name in submission.old_beside:
        cluster.delete(_JOB, name)
    wait_gone(cluster, spec, kind)
    for name in submission.old_beside:
        wait_gone(cluster, spec, _JOB, name, components=())


def _remove_job(cluster: Cluster, spec: RunSpec) -> None:
    """Remove the Job that prepared this run before, since the spec of a Job cannot be changed."""
    name = preprocess_name(spec)
    cluster.delete(_JOB, name)
    wait_gone(cluster, spec, _JOB, name, components=(PREPROCESS,))


def _start_beside(
    cluster: Cluster, spec: RunSpec, job: Manifest, apply: Callable[[Manifest], object]
) -> None:
    """Start a Job beside the workload, or let it go on. One that has ended is made anew."""
    name = job["metadata"]["name"]
    existing = cluster.get(_JOB, name)
    if existing is not None:
        state, _ = pods.state_of(existing, [])
        if state in ("done", "failed"):
            cluster.delete(_JOB, name)
            wait_gone(cluster, spec, _JOB, name, components=(SAMPLER,))
        elif state == "stopped":
            cluster.merge(_JOB, name, {"spec": {"suspend": False}})
    apply(job)


def _apply(cluster: Cluster, admission: Admission, obj: Manifest) -> None:
    """Apply an object. A bare pod that has ended is made anew."""
    name = obj["metadata"]["name"]
    if obj["kind"] == "Pod":
        pod = cluster.get("Pod", name)
        if pod is not None and pods.has_ended(pod):
            cluster.delete("Pod", name, grace_seconds=0)
    if obj["kind"] == _VOLUMES:
        _wait_until_new(cluster, name)
    admission.apply(obj)


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
    """True if an object exists and will go as soon as nothing needs it."""
    return obj is not None and "deletionTimestamp" in obj["metadata"]


def _wait_in_silence(cluster: Cluster, spec: RunSpec) -> None:
    wait_for_job(cluster, spec, lambda source, text: None)


def _make_tokens(admission: Admission, spec: RunSpec) -> None:
    """Give each server that asks for a token a random one, once."""
    for server in token_servers(spec):
        name, key = token_secret(spec, server)
        token = {key: secrets.token_urlsafe(32)}
        try:
            admission.create(
                spec.manifest("v1", "Secret", name, server, type="Opaque", stringData=token)
            )
        except Refused as error:
            # 409: it exists, from an earlier submit, and keeps its token.
            if error.code != 409:
                raise


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
    # Pods may save for as long as their grace period; the margin is for kubelet and controllers.
    patience = spec.kubernetes.grace_seconds + 2 * MARGIN_SECONDS
    with Informer(cluster, "Pod", spec.every_pod()) as informer:
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            left = []
            for pod in informer.objects():
                may_stay = kind is None and pods.has_ended(pod)
                if pods.component_of(pod) in components and not may_stay:
                    left.append(pod)
            if not left and (kind is None or cluster.get(kind, name) is None):
                return
            # Ends at once when a pod goes; else looks again, for the workload may go last.
            if informer.changed.wait(_LOOK_SECONDS):
                informer.changed.clear()
        names = ", ".join(pods.name_of(pod) for pod in left) or f"{kind} {name}"
    raise EnvironmentFault(
        f"{names} did not go within {patience} s; look at kubetune events {spec.typed}"
    )


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
    is_queued = bool(spec.kubernetes.queue) and kind.is_suspended_by_kueue
    if is_queued and kueue.is_installed(cluster):
        kueue.activate(cluster, workload, active=not suspend)
        return
    beside = kind.beside(spec)
    if not suspend:
        # Before the trainer, which asks them.
        for obj in _rendered(spec):
            if obj["kind"] == _JOB and obj["metadata"]["name"] in beside:
                _start_beside(cluster, spec, obj, cluster.apply)
    change = kind.suspension(spec.nodes, suspend=suspend)
    cluster.merge(kind.name, spec.name, change)
    if suspend:
        for name in beside:
            if cluster.get(_JOB, name) is not None:
                cluster.merge(_JOB, name, {"spec": {"suspend": True}})


def _rendered(spec: RunSpec) -> list[Manifest]:
    """Return the objects of a run that the cluster has the config of."""
    files = {f"/{name}": text for name, text in spec.files.items()}
    return render(spec.config, plan_without_data(spec.config), files)


def deletable(cluster: Cluster, spec: RunSpec, *, volumes: bool) -> list[Object]:
    """Return the objects of a run that exist, in the order to delete them: the workload first.

    Its volumes are among them only where asked for, since results lie there.
    """
    objects = _rendered(spec)
    for server in token_servers(spec):
        name, _ = token_secret(spec, server)
        objects.append(spec.manifest("v1", "Secret", name, server))

    # The ConfigMap is what the run is found by: last, so that a broken-off deletion can be taken up again.
    objects.reverse()

    def order(obj: Manifest) -> tuple[bool, bool]:
        is_needed_by_pods = obj["kind"] in ("ConfigMap", _VOLUMES)
        return is_needed_by_pods, obj["metadata"]["name"] == spec.name

    objects.sort(key=order)

    existing: list[Object] = []
    if volumes:
        # A copy that was broken off may have left a pod, and a claim stays for as long as a pod has it.
        existing += cluster.list("Pod", spec.selector(FILES))
    for obj in objects:
        is_wanted = volumes or obj["kind"] != _VOLUMES
        if is_wanted and _exists(cluster, obj):
            existing.append(obj)
    return existing


def _exists(cluster: Cluster, obj: Manifest) -> bool:
    """True if an object exists, or may exist where the user may not read it."""
    kind = obj["kind"]
    try:
        return cluster.get(kind, obj["metadata"]["name"]) is not None
    except Refused as error:
        # Whoever may not read roles has not made any. Other objects may exist, and deleting tells.
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
