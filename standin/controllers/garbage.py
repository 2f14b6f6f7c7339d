"""Garbage collection by owner references, namespaces and their default account, and the binding of claims."""

from __future__ import annotations

import shutil

from standin.controllers.context import Context
from standin.state.objects import (
    Object,
    claim_name,
    name_of,
    namespace_of,
    owner_uids,
    terminating,
    uid_of,
)
from standin.state.store import PROTECTION

_FOREGROUND = "foregroundDeletion"


def reconcile(context: Context) -> None:
    _collect(context)
    _finish_foreground_deletions(context)
    for namespace in context.store.list("Namespace"):
        _reconcile_namespace(context, namespace)
    for claim in context.store.list("PersistentVolumeClaim"):
        _bind(context, claim)
        is_held = terminating(claim) and PROTECTION in _finalizers(claim)
        if is_held and not context.store.is_mounted(claim):
            _finalizers(claim).remove(PROTECTION)
            context.store.touch(claim)
    for pod in context.store.list("Pod"):
        _create_ephemeral_claims(context, pod)


def _finalizers(obj: Object) -> list[str]:
    finalizers: list[str] = obj["metadata"].get("finalizers", [])
    return finalizers


def _collect(context: Context) -> None:
    """Delete what has lost all its owners, or whose owners wait for it in a foreground deletion."""
    # An owner is known by its uid: another object of its name is none.
    live = {uid_of(obj): obj for obj in context.store.objects.values()}
    for obj in list(live.values()):
        if not owner_uids(obj) or terminating(obj):
            continue
        owners = [live[uid] for uid in owner_uids(obj) if uid in live]
        if not owners:
            context.store.delete(obj)
        elif all(_FOREGROUND in _finalizers(owner) for owner in owners):
            context.store.delete(obj, propagation="Foreground")


def _finish_foreground_deletions(context: Context) -> None:
    """Let go of owners that no dependent holds back any more."""
    objects = list(context.store.objects.values())
    blocked = set()
    for obj in objects:
        for reference in obj["metadata"].get("ownerReferences", []):
            if reference.get("blockOwnerDeletion"):
                blocked.add(reference["uid"])
    for obj in objects:
        if terminating(obj) and _FOREGROUND in _finalizers(obj) and uid_of(obj) not in blocked:
            _finalizers(obj).remove(_FOREGROUND)
            context.store.touch(obj)


def _reconcile_namespace(context: Context, namespace: Object) -> None:
    """Give a namespace its default account; empty one that is to go, and let it go."""
    name = name_of(namespace)
    if not terminating(namespace):
        if not context.store.get("ServiceAccount", name, "default"):
            account = {"apiVersion": "v1", "kind": "ServiceAccount"}
            context.store.create({**account, "metadata": {"name": "default", "namespace": name}})
        return
    inside = [obj for obj in context.store.objects.values() if namespace_of(obj) == name]
    for obj in inside:
        if not terminating(obj):
            context.store.delete(obj)
    if not inside:
        namespace["metadata"]["finalizers"] = []
        context.store.touch(namespace)


def _bind(context: Context, claim: Object) -> None:
    """Give a new claim its volume, which is an empty folder."""
    if "phase" in claim.get("status", {}):
        return
    spec = claim["spec"]
    spec["volumeName"] = "pvc-" + uid_of(claim)
    place = (namespace_of(claim), name_of(claim))
    # What an earlier claim of that name held has gone with it.
    if place in context.bound:
        shutil.rmtree(context.settings.state.joinpath("claims", *place), ignore_errors=True)
    context.bound.add(place)
    claim["status"] = {
        "phase": "Bound",
        "accessModes": spec["accessModes"],
        "capacity": spec["resources"]["requests"],
    }
    context.store.touch(claim)


def _create_ephemeral_claims(context: Context, pod: Object) -> None:
    """Create the claims that go with a pod."""
    for volume in pod["spec"].get("volumes", []):
        if "ephemeral" not in volume or terminating(pod):
            continue
        name = claim_name(name_of(pod), volume) or ""
        if not context.store.get("PersistentVolumeClaim", namespace_of(pod), name):
            template = volume["ephemeral"]["volumeClaimTemplate"]
            context.create(pod, "PersistentVolumeClaim", {"name": name}, template["spec"])
