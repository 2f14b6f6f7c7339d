"""Faults that tests ask for: what a cluster does to a training run, on command.

They arrive as `POST /standin/faults/NAME` with a JSON body and take effect at once; `clear` ends them all. Outages of
the API server itself are in server.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .errors import forbidden
from .objects import Object, finished, set_condition, terminating
from .resources import BY_KIND, RESOURCES, Resource

if TYPE_CHECKING:
    from .kubelet import Kubelet
    from .store import Store


class Faults:
    """The faults in force now."""

    def __init__(self) -> None:
        self._unschedulable: list[str] = []
        self._broken_images: list[str] = []
        self._uninstalled: set[str] = set()
        self._refusals: dict[str, str] = {}

    def never_schedule(self, pod: str) -> None:
        """No node ever fits a pod whose `namespace/name` matches this regular expression."""
        self._unschedulable.append(pod)

    def break_image(self, image: str) -> None:
        """Images whose name matches this regular expression cannot be pulled."""
        self._broken_images.append(image)

    def uninstall(self, kind: str) -> None:
        """The server does not know this kind: its CustomResourceDefinition is not there."""
        self._uninstalled.add(kind)

    def refuse(self, kind: str, message: str) -> None:
        """Nobody, controllers included, may create objects of this kind: a quota or a webhook says no."""
        self._refusals[kind] = message

    def clear(self) -> None:
        for faults in (self._unschedulable, self._broken_images, self._uninstalled, self._refusals):
            faults.clear()

    def served(self) -> list[Resource]:
        """The kinds that are installed."""
        return [resource for resource in RESOURCES if resource.kind not in self._uninstalled]

    def check_creation(self, obj: Object) -> None:
        """Raise ApiError 403 where objects of this kind are refused."""
        if message := self._refusals.get(obj["kind"]):
            name = obj["metadata"].get("name") or obj["metadata"].get("generateName")
            raise forbidden(f'{BY_KIND[obj["kind"]].group_resource} "{name}" is forbidden: {message}')

    def is_unschedulable(self, pod: str) -> bool:
        return any(re.search(pattern, pod) for pattern in self._unschedulable)

    def image_is_broken(self, image: str) -> bool:
        return any(re.search(pattern, image) for pattern in self._broken_images)


def evict(store: Store, pod: Object, grace_seconds: int | None = None) -> None:
    """Delete a pod the way the eviction API and `kubectl drain` do: marked as a disruption, with its grace period."""
    message = "Eviction API: evicting"
    if set_condition(pod.setdefault("status", {}), "DisruptionTarget", "True", "EvictionByEvictionAPI", message):
        store.touch(pod)
    store.delete(pod, grace_seconds)


def drain(store: Store, node_name: str) -> None:
    """Cordon a node and evict every pod on it."""
    node = store.get("Node", "", node_name)
    if node is None:
        raise KeyError(f"there is no node {node_name}")
    node["spec"]["unschedulable"] = True
    store.touch(node)
    for pod in store.list("Pod"):
        if pod["spec"].get("nodeName") == node_name and not finished(pod) and not terminating(pod):
            evict(store, pod)


def inject(faults: Faults, store: Store, kubelet: Kubelet, name: str, body: Object) -> None:
    """Carry out one request; KeyError or TypeError when there is no such fault, pod or node, or no such argument."""
    match name:
        case "kill-pod":
            pod = store.get("Pod", body["namespace"], body["pod"])
            worker = kubelet.worker(pod) if pod else None
            if worker is None or not worker.kill(body["reason"]):
                raise KeyError(f"there is no running pod {body['namespace']}/{body['pod']}")
        case "drain":
            drain(store, body["node"])
        case "never-schedule":
            faults.never_schedule(**body)
        case "break-image":
            faults.break_image(**body)
        case "uninstall":
            faults.uninstall(**body)
        case "refuse":
            faults.refuse(**body)
        case "clear":
            faults.clear()
            for node in store.list("Node"):
                node["spec"].pop("unschedulable", None)
                store.touch(node)
        case _:
            raise KeyError(f"there is no fault {name}")
    store.changed.set()
