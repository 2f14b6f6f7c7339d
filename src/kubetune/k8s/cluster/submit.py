"""Starts runs on a cluster. It applies the objects that `render` makes, and nothing else.

A name belongs to one run, as a run directory does: another config of the same name is refused, unless it differs only
in what moves no number, and then the pods are replaced and go on from the newest checkpoint.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from kubetune.config import consent
from kubetune.config.schema import Config
from kubetune.errors import ConfigError, EnvironmentFault
from kubetune.k8s.api.api_errors import NoNamespace, Refused, missing_rights
from kubetune.k8s.api.client import Cluster, Object
from kubetune.k8s.cluster import kueue, pods, preparation
from kubetune.k8s.cluster.admission import Admission
from kubetune.k8s.cluster.log_follow import wait_for_job
from kubetune.k8s.cluster.stopping import LOOK_SECONDS, VOLUMES, start_beside, wait_gone
from kubetune.k8s.cluster.submission import JOB, Outcome, Submission, compare
from kubetune.k8s.manifests.extra_objects import token_secret, token_servers
from kubetune.k8s.manifests.initialisers import PREPROCESS, preprocess_name
from kubetune.k8s.manifests.kinds.kind import State
from kubetune.k8s.manifests.kinds.registry import kind_of
from kubetune.k8s.manifests.run_spec import (
    Manifest,
    RunSpec,
)

Confirm = Callable[[str], bool]

_GOING_SECONDS = 120.0
# What servers say of fields of a workload that cannot be changed.
_FIXED = re.compile(r"immutable|updates to statefulset spec")


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
    submission = compare(cluster, config, files, change)
    spec = submission.spec
    admission = Admission(cluster, submission.objects)
    if submission.workload is None:
        _wait_for_claims(cluster, spec)
    _check(cluster, submission, admission)
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


def _to_check(submission: Submission) -> list[Manifest]:
    """Return the objects to try in a dry run.

    An object that replaces an old one is left out: the server would refuse a change of fields that are fixed, although
    the old object will be gone by then.
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
    submission: Submission,
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
            start_beside(cluster, spec, obj, admission.apply)
    for obj in submission.objects:
        if submission.is_trainer(obj):
            admission.apply(obj)


def _check(cluster: Cluster, submission: Submission, admission: Admission) -> None:
    """Raise EnvironmentFault with all that the server would refuse, and with missing Secrets and queues."""
    spec = submission.spec
    problems = _missing_secrets(cluster, spec)
    if spec.kubernetes.queue:
        missing_queue = kueue.missing_queue(cluster, spec.kubernetes.queue)
        if missing_queue:
            problems.append(missing_queue)

    try:
        rights, refused = admission.try_all(_to_check(submission))
    except NoNamespace as error:
        raise EnvironmentFault(f"{error}. Nothing was changed.") from None
    problems += refused
    if submission.workload is not None and any(_FIXED.search(problem) for problem in refused):
        problems.append(
            f"the pods of {spec.name} were written by another release of kubetune, or changed since: kubetune delete "
            f"{spec.typed}, then submit again; the results stay, and the run goes on from its newest checkpoint"
        )
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


def _replace(cluster: Cluster, submission: Submission, confirm: Confirm) -> None:
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
        cluster.delete(JOB, name)
    wait_gone(cluster, spec, kind)
    for name in submission.old_beside:
        wait_gone(cluster, spec, JOB, name, components=())
    _wait_for_claims(cluster, spec)


def _remove_job(cluster: Cluster, spec: RunSpec) -> None:
    """Remove the Job that prepared this run before, since the spec of a Job cannot be changed."""
    name = preprocess_name(spec)
    cluster.delete(JOB, name)
    wait_gone(cluster, spec, JOB, name, components=(PREPROCESS,))


def _apply(cluster: Cluster, admission: Admission, obj: Manifest) -> None:
    """Apply an object. A bare pod that has ended is made anew."""
    name = obj["metadata"]["name"]
    if obj["kind"] == "Pod":
        pod = cluster.get("Pod", name)
        if pod is not None and pods.has_ended(pod):
            cluster.delete("Pod", name, grace_seconds=0)
    if obj["kind"] == VOLUMES:
        # What is applied to a claim that is being deleted would go with it.
        _wait_while(cluster, name, _is_being_deleted)
    admission.apply(obj)


def _wait_for_claims(cluster: Cluster, spec: RunSpec) -> None:
    """Wait for the claims of a workload that is gone: another one of its name is refused while they are there."""
    for claim in kind_of(spec.kubernetes.kind).claims(spec):
        _wait_while(cluster, claim, _goes_with_its_owner)


def _wait_while(cluster: Cluster, claim: str, test: Callable[[Object | None], bool]) -> None:
    """Wait while a test is true of a claim. Raise EnvironmentFault where it stays true."""
    deadline = time.monotonic() + _GOING_SECONDS
    while test(cluster.get(VOLUMES, claim)):
        if time.monotonic() > deadline:
            raise EnvironmentFault(
                f"claim {claim} is to be deleted, and pods that use it are still there: kubectl describe pvc {claim} "
                f"-n {cluster.namespace} names them. Submit again when it has gone"
            )
        cluster.tell_once(
            f"claim {claim} is being deleted; waiting until the pods that use it have gone"
        )
        time.sleep(LOOK_SECONDS)


def _is_being_deleted(obj: Object | None) -> bool:
    """True if an object exists and will go as soon as nothing needs it."""
    return obj is not None and "deletionTimestamp" in obj["metadata"]


def _goes_with_its_owner(claim: Object | None) -> bool:
    """True if a claim exists and goes, or will some moments after its owner, which is gone."""
    return claim is not None and (
        _is_being_deleted(claim) or bool(claim["metadata"].get("ownerReferences"))
    )


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
