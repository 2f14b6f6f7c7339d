"""apps/v1 StatefulSet and Deployment: pods that are kept at a number and rolled to a new template."""

from __future__ import annotations

import copy
import hashlib
import json

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

_REVISION = "controller-revision-hash"
_POD_INDEX = "apps.kubernetes.io/pod-index"
_TEMPLATE_HASH = "pod-template-hash"


def reconcile(context: Context) -> None:
    """Bring all StatefulSets and Deployments forward."""
    for obj in context.store.list("StatefulSet"):
        if not terminating(obj):
            _reconcile_stateful_set(context, obj)
    for obj in context.store.list("Deployment"):
        if not terminating(obj):
            _reconcile_deployment(context, obj)


def _digest(template: Object) -> str:
    """Return a text that tells templates apart."""
    return hashlib.sha1(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]


# -- StatefulSet
def _reconcile_stateful_set(context: Context, obj: Object) -> None:
    spec = obj["spec"]
    name = name_of(obj)
    replicas = spec.get("replicas", 1)
    revision = f"{name}-{_digest(spec['template'])}"
    pods: dict[str, Object | None] = {name_of(pod): pod for pod in context.owned(obj, "Pod")}
    for index in range(replicas):
        pod_name = f"{name}-{index}"
        _create_claims(context, obj, pod_name)
        pod = pods.get(pod_name) or _start_member(context, obj, index, revision)
        # A member that has ended comes back under the same name, once this pod is gone.
        if pod and finished(pod) and not terminating(pod):
            _delete_member(context, obj, pod)
        # In order: the next one is made when this one is ready.
        is_ready = pod is not None and condition(pod, "Ready") is not None
        if spec.get("podManagementPolicy") != "Parallel" and not is_ready:
            break
    members = context.owned(obj, "Pod")
    stale = _next_to_go(members, replicas, revision)
    if stale:
        _delete_member(context, obj, stale)
    updated = [pod for pod in members if labels_of(pod)[_REVISION] == revision]
    _report(obj, members, len(updated))
    obj["status"].update(currentRevision=revision, updateRevision=revision)
    context.store.touch(obj)


def _delete_member(context: Context, obj: Object, pod: Object) -> None:
    text = f"delete Pod {name_of(pod)} in StatefulSet {name_of(obj)} successful"
    context.delete_pod(obj, pod, text)


def _create_claims(context: Context, obj: Object, pod_name: str) -> None:
    """Create the claims of a member that do not exist; they outlive the set unless it says otherwise."""
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
    """Create the pod of an index, with its own claims."""
    spec = obj["spec"]
    pod_name = f"{name_of(obj)}-{index}"
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
    """Return the highest member that is surplus, or else out of date while all new ones are ready; one at a time."""
    surplus = []
    outdated = []
    all_new_are_ready = True
    for pod in members:
        if terminating(pod):
            return None
        if _member_index(pod) >= replicas:
            surplus.append(pod)
        if labels_of(pod)[_REVISION] != revision:
            outdated.append(pod)
        elif not condition(pod, "Ready"):
            all_new_are_ready = False
    if not all_new_are_ready:
        outdated = []
    return max(surplus or outdated, key=_member_index, default=None)


def _member_index(pod: Object) -> int:
    return int(labels_of(pod)[_POD_INDEX])


# -- Deployment
def _reconcile_deployment(context: Context, obj: Object) -> None:
    spec = obj["spec"]
    digest = _digest(spec["template"])
    wanted = spec.get("replicas", 1)
    pods = [pod for pod in context.owned(obj, "Pod") if not terminating(pod)]
    current = [pod for pod in pods if labels_of(pod)[_TEMPLATE_HASH] == digest]
    for _ in range(wanted - len(current)):
        metadata = {
            "generateName": f"{name_of(obj)}-{digest}-",
            "labels": {_TEMPLATE_HASH: digest},
        }
        context.create_pod(obj, spec["template"], metadata)
    for pod in current[wanted:]:
        context.store.delete(pod)
    # Those of older templates stay until enough of the newest are ready.
    if _count_ready(current) >= wanted:
        for pod in pods:
            if pod not in current:
                context.store.delete(pod)
    _report(obj, current, len(current))
    context.store.touch(obj)


def _count_ready(pods: list[Object]) -> int:
    return sum(bool(condition(pod, "Ready")) for pod in pods)


def _report(obj: Object, pods: list[Object], updated: int) -> None:
    """Write down how many pods there are, are ready, and are of the newest template."""
    ready_pods = _count_ready(pods)
    obj.setdefault("status", {}).update(
        observedGeneration=obj["metadata"]["generation"],
        replicas=len(pods),
        readyReplicas=ready_pods,
        availableReplicas=ready_pods,
        currentReplicas=updated,
        updatedReplicas=updated,
    )
