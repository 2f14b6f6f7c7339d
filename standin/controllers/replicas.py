"""apps/v1 StatefulSet and Deployment: pods that are kept at a number and rolled to a new template."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable

from standin.controllers.context import Context
from standin.state.objects import (
    Object,
    condition,
    finished,
    labels_of,
    name_of,
    namespace_of,
    terminating,
)

_REVISION, _POD_INDEX = "controller-revision-hash", "apps.kubernetes.io/pod-index"
_TEMPLATE_HASH = "pod-template-hash"


def reconcile(context: Context) -> None:
    for obj in context.store.list("StatefulSet"):
        if not terminating(obj):
            _reconcile_stateful_set(context, obj)
    for obj in context.store.list("Deployment"):
        if not terminating(obj):
            _reconcile_deployment(context, obj)


def _digest(template: Object) -> str:
    return hashlib.sha1(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]


# -- StatefulSet
def _reconcile_stateful_set(context: Context, obj: Object) -> None:
    spec, name = obj["spec"], name_of(obj)
    revision = f"{name}-{_digest(spec['template'])}"
    pods: dict[str, Object | None] = {name_of(pod): pod for pod in context.owned(obj, "Pod")}
    for index in range(spec.get("replicas", 1)):
        pod_name = f"{name}-{index}"
        _create_claims(context, obj, pod_name)
        pod = pods.get(pod_name) or _start_member(context, obj, index, revision)
        if pod and finished(pod) and not terminating(pod):
            context.store.delete(pod)
        if spec.get("podManagementPolicy") != "Parallel" and not (pod and condition(pod, "Ready")):
            break
    members = context.owned(obj, "Pod")
    if stale := _next_to_go(members, spec.get("replicas", 1), revision):
        context.store.delete(stale)
    _report(context, obj, members, lambda pod: labels_of(pod)[_REVISION] == revision)
    obj["status"].update(currentRevision=revision, updateRevision=revision)
    context.store.touch(obj)


def _create_claims(context: Context, obj: Object, pod_name: str) -> None:
    for template in obj["spec"].get("volumeClaimTemplates", []):
        claim_name = f"{template['metadata']['name']}-{pod_name}"
        if context.store.get("PersistentVolumeClaim", namespace_of(obj), claim_name):
            continue
        claim = context.create(obj, "PersistentVolumeClaim", {"name": claim_name}, template["spec"])
        policy = obj["spec"].get("persistentVolumeClaimRetentionPolicy") or {}
        if claim and policy.get("whenDeleted") != "Delete":
            del claim["metadata"]["ownerReferences"]
            context.store.touch(claim)


def _start_member(context: Context, obj: Object, index: int, revision: str) -> Object | None:
    spec, pod_name = obj["spec"], f"{name_of(obj)}-{index}"
    template = copy.deepcopy(spec["template"])
    for claim in spec.get("volumeClaimTemplates", []):
        name = claim["metadata"]["name"]
        volume = {"name": name, "persistentVolumeClaim": {"claimName": f"{name}-{pod_name}"}}
        template["spec"].setdefault("volumes", []).append(volume)
    labels = {
        _POD_INDEX: str(index),
        "statefulset.kubernetes.io/pod-name": pod_name,
        _REVISION: revision,
    }
    identity = {"hostname": pod_name, "subdomain": spec.get("serviceName", "")}
    return context.create_pod(obj, template, {"name": pod_name, "labels": labels}, **identity)


def _next_to_go(members: list[Object], replicas: int, revision: str) -> Object | None:
    """The highest member that is surplus, or else out of date while all new ones are ready; one at a time."""

    def index(pod: Object) -> int:
        return int(labels_of(pod)[_POD_INDEX])

    if any(terminating(pod) for pod in members):
        return None
    surplus = [pod for pod in members if index(pod) >= replicas]
    outdated = [pod for pod in members if labels_of(pod)[_REVISION] != revision]
    if not all(condition(pod, "Ready") for pod in members if pod not in outdated):
        outdated = []
    return max(surplus or outdated, key=index, default=None)


# -- Deployment
def _reconcile_deployment(context: Context, obj: Object) -> None:
    spec, name = obj["spec"], name_of(obj)
    digest, wanted = _digest(spec["template"]), spec.get("replicas", 1)
    pods = [pod for pod in context.owned(obj, "Pod") if not terminating(pod)]
    current = [pod for pod in pods if labels_of(pod)[_TEMPLATE_HASH] == digest]
    for _ in range(wanted - len(current)):
        metadata = {"generateName": f"{name}-{digest}-", "labels": {_TEMPLATE_HASH: digest}}
        context.create_pod(obj, spec["template"], metadata)
    for pod in current[wanted:]:
        context.store.delete(pod)
    if sum(bool(condition(pod, "Ready")) for pod in current) >= wanted:
        for pod in pods:
            if pod not in current:
                context.store.delete(pod)
    _report(context, obj, current, lambda pod: True)
    context.store.touch(obj)


def _report(
    context: Context, obj: Object, pods: list[Object], updated: Callable[[Object], bool]
) -> None:
    ready = sum(bool(condition(pod, "Ready")) for pod in pods)
    current = sum(map(updated, pods))
    status = obj.setdefault("status", {})
    status.update(observedGeneration=obj["metadata"]["generation"], replicas=len(pods))
    status.update(
        readyReplicas=ready,
        availableReplicas=ready,
        currentReplicas=current,
        updatedReplicas=current,
    )
