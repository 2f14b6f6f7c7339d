"""The object store: identity, resource versions, the watch history, deletion with finalizers, events.

Objects are edited in place by whoever holds them and published with `touch`; so controllers and the kubelet always
see the newest state, and watchers see every published one. All of it runs on one event loop, without locks.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import deque
from dataclasses import dataclass

from standin.state.errors import already_exists, forbidden, not_found
from standin.state.objects import (
    Object,
    claim_name,
    finished,
    name_of,
    namespace_of,
    now,
    owner_uids,
    random_suffix,
    terminating,
    uid_of,
)
from standin.state.resources import BY_KIND, Resource, resource_of

Key = tuple[Resource, str, str]

PROTECTION = "kubernetes.io/pvc-protection"
_HISTORY = 20_000
_WITHOUT_GENERATION = ("Service", "Namespace", "PersistentVolumeClaim")


@dataclass(frozen=True)
class Change:
    """One entry of the watch history."""

    revision: int
    resource: Resource
    type: str  # ADDED, MODIFIED or DELETED
    text: str  # the object as JSON
    before: str | None  # its previous text: a selector may have matched that, and not the new one


class Store:
    def __init__(self) -> None:
        self.objects: dict[Key, Object] = {}
        self.revision = 0
        self.oldest_revision = 0  # changes up to here have left the history
        self.history: deque[Change] = deque(maxlen=_HISTORY)
        self.watchers: set[asyncio.Queue[Change]] = set()
        self.changed = asyncio.Event()
        self._published: dict[Key, str] = {}

    # -- reading
    def list(
        self, kind: str, namespace: str | None = None, owner: Object | None = None
    ) -> list[Object]:
        """Return the objects of a kind; a namespace of None means all, an owner keeps only what refers to it."""
        objects = []
        for (resource, object_namespace, _), obj in self.objects.items():
            if resource.kind != kind or namespace not in (None, object_namespace):
                continue
            if owner is None or uid_of(owner) in owner_uids(obj):
                objects.append(obj)
        return objects

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """Return an object, None where there is none."""
        resource = BY_KIND[kind]
        if not resource.namespaced:
            namespace = ""
        return self.objects.get((resource, namespace, name))

    def require(self, resource: Resource, namespace: str, name: str) -> Object:
        """Return an object; ApiError 404 where there is none."""
        obj = self.objects.get((resource, namespace, name))
        if obj is None:
            raise not_found(resource, name)
        return obj

    # -- writing
    def create(self, obj: Object, dry_run: bool = False) -> Object:
        """Store a new object; ApiError where that cannot be."""
        resource = resource_of(obj)
        meta = obj["metadata"]
        if not meta.get("name"):
            meta["name"] = meta["generateName"] + random_suffix()
        key = _key(obj)
        if resource.namespaced and terminating(self.require(BY_KIND["Namespace"], "", key[1])):
            raise forbidden(
                f'{resource.group_resource} "{key[2]}" is forbidden: unable to create new content in namespace '
                f"{key[1]} because it is being terminated"
            )
        if key in self.objects:
            raise already_exists(resource, key[2])
        meta.update(uid=str(uuid.uuid4()), creationTimestamp=now(), resourceVersion="0")
        # Counts changes of the spec, so that a status can say which one it is about.
        if "spec" in obj and resource.kind not in _WITHOUT_GENERATION:
            meta["generation"] = 1
        if not dry_run:
            self.objects[key] = obj
            self._publish("ADDED", key, obj)
        return obj

    def touch(self, obj: Object) -> Object:
        """Publish in-place edits of a stored object, if there are any; remove it when its last finalizer is gone."""
        key = _key(obj)
        if self.objects.get(key) is not obj:
            return obj
        # Compared as watchers see it: an edit that changes nothing is no change.
        old = json.loads(self._published[key])
        if old == json.loads(json.dumps(obj)):
            return obj
        if "generation" in obj["metadata"] and old.get("spec") != obj.get("spec"):
            obj["metadata"]["generation"] += 1
        self._publish("MODIFIED", key, obj)
        if terminating(obj) and not obj["metadata"].get("finalizers") and not _graceful(obj):
            self._remove(obj)
        return obj

    def delete(
        self, obj: Object, grace_seconds: int | None = None, propagation: str = "Background"
    ) -> None:
        """Start or hasten a deletion; pods wait for their grace period, others for their finalizers."""
        meta = obj["metadata"]
        has_dependents = any(uid_of(obj) in owner_uids(other) for other in self.objects.values())
        if propagation == "Foreground" and has_dependents:
            meta["finalizers"] = sorted({*meta.get("finalizers", []), "foregroundDeletion"})
        if obj["kind"] == "Pod":
            grace_seconds = _pod_grace(obj, grace_seconds)
            meta["deletionGracePeriodSeconds"] = grace_seconds
        if obj["kind"] == "Namespace":
            meta.setdefault("finalizers", ["kubernetes"])
        if obj["kind"] == "PersistentVolumeClaim" and self.is_mounted(obj):
            meta["finalizers"] = sorted({*meta.get("finalizers", []), PROTECTION})
        if meta.get("finalizers") or _graceful(obj):
            meta.setdefault("deletionTimestamp", now(grace_seconds or 0))
            self.touch(obj)
        else:
            self._remove(obj)

    def is_mounted(self, claim: Object) -> bool:
        """True if some pod, ended or not, names the claim."""
        for pod in self.list("Pod", namespace_of(claim)):
            is_shut_down = terminating(pod) and not _graceful(pod)
            for volume in pod["spec"].get("volumes", []):
                # A claim that was made for its pod is held until that is shut down.
                if is_shut_down and "ephemeral" in volume:
                    continue
                if claim_name(name_of(pod), volume) == name_of(claim):
                    return True
        return False

    def event(self, obj: Object, type_: str, reason: str, message: str) -> None:
        """Record an event about an object; a repeated one only counts up."""
        namespace = namespace_of(obj) or "default"
        for known in self.list("Event", namespace):
            is_about_it = known["involvedObject"]["uid"] == uid_of(obj)
            if is_about_it and (known["reason"], known["message"]) == (reason, message):
                known["count"] += 1
                known["lastTimestamp"] = now()
                self.touch(known)
                return
        involved = {
            "apiVersion": obj["apiVersion"],
            "kind": obj["kind"],
            "name": name_of(obj),
            "namespace": namespace,
        }
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{name_of(obj)}.{random_suffix()}{random_suffix()}",
                "namespace": namespace,
            },
            "involvedObject": involved | {"uid": uid_of(obj)},
            "type": type_,
            "reason": reason,
            "message": message,
            "count": 1,
            "firstTimestamp": now(),
            "lastTimestamp": now(),
            "source": {"component": "standin"},
            "reportingComponent": "standin",
            "reportingInstance": "",
        }
        parent = self.get("Namespace", "", namespace)
        if parent and not terminating(parent):
            self.create(event)

    def _publish(self, type_: str, key: Key, obj: Object) -> None:
        self.revision += 1
        obj["metadata"]["resourceVersion"] = str(self.revision)
        text = json.dumps(obj)
        if len(self.history) == self.history.maxlen:
            self.oldest_revision = self.history[0].revision
        change = Change(self.revision, key[0], type_, text, self._published.get(key))
        self.history.append(change)
        self._published[key] = text
        for queue in self.watchers:
            queue.put_nowait(change)
        self.changed.set()

    def _remove(self, obj: Object) -> None:
        key = _key(obj)
        if self.objects.pop(key, None) is not None:
            self._publish("DELETED", key, obj)
            del self._published[key]


def _key(obj: Object) -> Key:
    return resource_of(obj), namespace_of(obj), name_of(obj)


def _graceful(obj: Object) -> bool:
    return obj["kind"] == "Pod" and bool(obj["metadata"].get("deletionGracePeriodSeconds"))


def _pod_grace(pod: Object, asked_seconds: int | None) -> int:
    """Return the grace period of a deletion, in seconds; a second one may only shorten it."""
    # One that runs nowhere needs none.
    if finished(pod) or not pod["spec"].get("nodeName"):
        return 0
    grace: int = pod["spec"].get("terminationGracePeriodSeconds", 30)
    if asked_seconds is not None:
        grace = asked_seconds
    if terminating(pod):
        grace = min(grace, pod["metadata"]["deletionGracePeriodSeconds"])
    return grace
