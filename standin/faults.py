"""Faults that tests ask for: what a cluster does to a training run, on command.

They arrive as `POST /standin/faults/NAME` with a JSON body and take effect at once; `clear` ends them all. Outages of
the API server itself are in server.py.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

from aiohttp import web

from standin.state.errors import ApiError, forbidden
from standin.state.objects import Object, finished, set_condition, terminating
from standin.state.resources import BY_KIND, RESOURCES, Resource
from standin.state.store import Store

_KUBELET_PATHS = {"log": "containerLogs", "portforward": "portForward"}
# A real server refuses for some seconds; counted, it is the same on a slow machine.
_REFUSALS_AT_START = 5


@dataclass
class Trouble:
    """Fate of a user's requests, `get pods/exec` say, that match a regular expression.

    `about`: only of those about objects in whose names this regular expression is found.

    `code`: refused with it, and `message`, as a Status (`html`: as a page of some proxy; 200: as plain text).
    `cut`: the connection is closed, `before` the answer or `within` it. `seconds`: it takes so long first. `times`: of
    so many.
    """

    request: str
    about: str = ""
    code: int = 0
    message: str = "internal error"
    html: bool = False
    cut: str = ""
    seconds: float = 0.0
    times: int = -1


class Faults:
    """The faults in force now, and what users have asked for since the last `clear`."""

    def __init__(self) -> None:
        self._troubles: list[Trouble] = []
        self.asked: list[str] = []
        self._unschedulable: list[str] = []
        self._broken_images: list[str] = []
        self._unbound: list[str] = []
        self._uninstalled: set[str] = set()
        self._refusals: dict[str, str] = {}
        self._nodes_away: set[str] = set()
        self._starting = 0

    def never_schedule(self, pod: str) -> None:
        """No node ever fits a pod whose `namespace/name` matches this regular expression."""
        self._unschedulable.append(pod)

    def break_image(self, image: str) -> None:
        """Images whose name matches this regular expression cannot be pulled."""
        self._broken_images.append(image)

    def leave_unbound(self, claim: str) -> None:
        """Nothing provides a volume for claims whose `namespace/name` matches this regular expression."""
        self._unbound.append(claim)

    def uninstall(self, kind: str) -> None:
        """The server does not know this kind: its CustomResourceDefinition is not there."""
        self._uninstalled.add(kind)

    def refuse(self, kind: str, message: str) -> None:
        """Nobody, controllers included, may create objects of this kind: a quota or a webhook says no."""
        self._refusals[kind] = message

    def leave_kubelet(self, node: str) -> None:
        """The kubelet of a node does not answer: no log and no command in its pods, which go on."""
        self._nodes_away.add(node)

    def is_kubelet_away(self, pod: Object) -> bool:
        return pod["spec"].get("nodeName") in self._nodes_away

    def require_kubelet(self, pod: Object, subresource: str) -> None:
        """Raise ApiError 500, as the API server does for a node that refuses connections."""
        if self.is_kubelet_away(pod):
            address = "10.88.7.1:10250"
            where = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
            message = (
                f'Get "https://{address}/{_KUBELET_PATHS.get(subresource, subresource)}/{where}": '
                f"dial tcp {address}: connect: connection refused"
            )
            raise ApiError(500, "InternalError", message)

    def start_slowly(self) -> None:
        """The API server has just started: its next answers to users without all rights are refusals."""
        self._starting = _REFUSALS_AT_START

    def is_starting(self) -> bool:
        """True for the first requests after a start, which this counts: no Role is known yet."""
        self._starting -= 1
        return self._starting >= 0

    def trouble(self, **facts: object) -> None:
        """Users' requests of a kind fail: see Trouble."""
        self._troubles.append(Trouble(**facts))  # type: ignore[arg-type]

    async def meet(self, request: web.Request, asked: str, name: str) -> web.StreamResponse | None:
        """Fate of a user's request before it is served: ApiError, or an answer in the place of the true one."""
        self.asked.append(asked)
        for trouble in self._troubles:
            if (
                trouble.times
                and re.fullmatch(trouble.request, asked)
                and re.search(trouble.about, name)
            ):
                trouble.times -= 1
                await asyncio.sleep(trouble.seconds)
                if trouble.cut:
                    return await _cut(request, within=trouble.cut == "within")
                if trouble.code and trouble.html:
                    page = f"<html><h1>{trouble.message}</h1></html>"
                    return web.Response(text=page, status=trouble.code, content_type="text/html")
                if trouble.code == 200:
                    return web.Response(text=trouble.message)
                if trouble.code:
                    raise ApiError(trouble.code, "InternalError", trouble.message)
        return None

    def clear(self) -> None:
        for faults in (
            self._unschedulable,
            self._unbound,
            self._broken_images,
            self._uninstalled,
            self._refusals,
            self._nodes_away,
        ):
            faults.clear()
        self._starting = 0
        self._troubles.clear()
        self.asked.clear()

    def served(self) -> list[Resource]:
        """The kinds that are installed."""
        return [resource for resource in RESOURCES if resource.kind not in self._uninstalled]

    def check_creation(self, obj: Object) -> None:
        """Raise ApiError 403 where objects of this kind are refused."""
        if message := self._refusals.get(obj["kind"]):
            name = obj["metadata"].get("name") or obj["metadata"].get("generateName")
            raise forbidden(
                f'{BY_KIND[obj["kind"]].group_resource} "{name}" is forbidden: {message}'
            )

    def is_unschedulable(self, pod: str) -> bool:
        return any(re.search(pattern, pod) for pattern in self._unschedulable)

    def is_unbound(self, claim: str) -> bool:
        return any(re.search(pattern, claim) for pattern in self._unbound)

    def image_is_broken(self, image: str) -> bool:
        return any(re.search(pattern, image) for pattern in self._broken_images)


async def _cut(request: web.Request, *, within: bool) -> web.StreamResponse:
    """Close a connection, as a proxy that is restarted does; `within`: when the answer has begun."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    if within and "websocket" in request.headers.get("Upgrade", "").lower():
        response = web.WebSocketResponse(protocols=("v5.channel.k8s.io", "v4.channel.k8s.io"))
        await response.prepare(request)
    elif within:
        await response.prepare(request)
        await response.write(b'{"kind": "Sta')
    assert request.transport is not None
    # after what was written has left
    request.transport.close()
    return response


def evict(store: Store, pod: Object, grace_seconds: int | None = None) -> None:
    """Delete a pod the way the eviction API and `kubectl drain` do: marked as a disruption, with its grace period."""
    message = "Eviction API: evicting"
    if set_condition(
        pod.setdefault("status", {}), "DisruptionTarget", "True", "EvictionByEvictionAPI", message
    ):
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
