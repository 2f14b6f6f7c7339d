"""Faults that tests ask for: what a cluster does to a training run, on command.

They arrive as `POST /standin/faults/NAME` with a JSON body and take effect at once; `clear` ends them all. Outages of
the API server itself are in server.py.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from dataclasses import dataclass

from aiohttp import web

from standin.state.errors import ApiError, forbidden
from standin.state.objects import Object, finished, set_condition, terminating
from standin.state.resources import BY_KIND, RESOURCES, Resource
from standin.state.store import Store

# A kubelet knows no pod for up to a second after its start; counted, it is the same on a slow machine.
_REFUSALS_OF_KUBELET = 3
_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
_KUBELET_PATHS = {"log": "containerLogs", "portforward": "portForward"}
# A real server refuses for some seconds; counted, it is the same on a slow machine.
_REFUSALS_AT_START = 5


@dataclass
class Trouble:
    """What becomes of users' requests of a kind."""

    # Regular expression that the whole request matches, such as `get pods/exec`.
    request: str
    # Regular expression that is found in the name of the object.
    about: str = ""
    # It is refused with this code, as a Status with the message; 200: the message is the answer.
    code: int = 0
    message: str = "internal error"
    # It is refused with a page of some proxy.
    html: bool = False
    # The connection is closed, `before` the answer or `within` it.
    cut: str = ""
    # It takes so long first.
    seconds: float = 0.0
    # So many requests pass first.
    after: int = 0
    # It meets so many requests; all of them below 0.
    times: int = -1


class Faults:
    """The faults in force now, and what users have asked for since the last `clear`."""

    def __init__(self) -> None:
        self._troubles: list[Trouble] = []
        self.asked: list[str] = []
        # Regular expressions.
        self._unschedulable: list[str] = []
        self._broken_images: list[str] = []
        self._unbound: list[str] = []
        # Kinds; of those that are refused, the message.
        self._uninstalled: set[str] = set()
        self._refusals: dict[str, str] = {}
        self._nodes_away: set[str] = set()
        self._hosts_cut: set[str] = set()
        self._starting = 0  # refusals that are left
        self._kubelet_starts: Counter[str] = Counter()  # by node
        self._kubelet_refusals: Counter[str] = Counter()  # that are left, by node
        self._too_large = 0  # lists and watches that are yet to be refused

    def never_schedule(self, pod: str) -> None:
        """Let no node ever fit a pod whose `namespace/name` matches this regular expression."""
        self._unschedulable.append(pod)

    def break_image(self, image: str) -> None:
        """Let images whose name matches this regular expression not be pulled."""
        self._broken_images.append(image)

    def leave_unbound(self, claim: str) -> None:
        """Let claims whose `namespace/name` matches this regular expression get no volume."""
        self._unbound.append(claim)

    def uninstall(self, kind: str) -> None:
        """Let the server not know this kind, as where its CustomResourceDefinition is not installed."""
        self._uninstalled.add(kind)

    def refuse(self, kind: str, message: str) -> None:
        """Let nobody, controllers included, create objects of this kind, as a quota or a webhook does."""
        self._refusals[kind] = message

    def leave_kubelet(self, node: str) -> None:
        """Let the kubelet of a node not answer: no log and no command in its pods, which go on."""
        self._nodes_away.add(node)

    def is_kubelet_away(self, pod: Object) -> bool:
        return pod["spec"].get("nodeName") in self._nodes_away

    def cut_host(self, node: str) -> None:
        """Let nothing of a node be heard any more: its kubelet does not answer, and ends no pod."""
        self._nodes_away.add(node)
        self._hosts_cut.add(node)

    def holds(self, store: Store, pod: Object) -> bool:
        """True if a pod cannot end since its host is cut off, and nobody has said that it is lost for good."""
        name = pod["spec"].get("nodeName", "")
        if name not in self._hosts_cut:
            return False
        node = store.get("Node", "", name)
        if node is None:
            return False
        return not any(taint["key"] == _OUT_OF_SERVICE for taint in node["spec"].get("taints", []))

    def restart_kubelet(self, node: str) -> None:
        """Let the kubelet of a node start anew: it cuts its streams, and knows no pod at first."""
        self._kubelet_starts[node] += 1
        self._kubelet_refusals[node] = _REFUSALS_OF_KUBELET

    def kubelet_start(self, pod: Object) -> int:
        """Return the number of the present start of a pod's kubelet."""
        return self._kubelet_starts[pod["spec"].get("nodeName", "")]

    def lag_behind(self, times: int) -> None:
        """Refuse so many lists and watches of users: the server has not read yet what it was asked for."""
        self._too_large = times

    def take_refusal_when_behind(self) -> bool:
        """Count down the refusals of lists and watches. Return False if none is left."""
        self._too_large -= 1
        return self._too_large >= 0

    def require_kubelet(self, pod: Object, subresource: str) -> None:
        """Raise ApiError 500, as the API server does for a node that refuses connections; 404 for one that just started."""
        if self.is_kubelet_away(pod):
            address = "10.88.7.1:10250"
            where = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
            message = (
                f'Get "https://{address}/{_KUBELET_PATHS.get(subresource, subresource)}/{where}": '
                f"dial tcp {address}: connect: connection refused"
            )
            raise ApiError(500, "InternalError", message)
        node = pod["spec"].get("nodeName", "")
        if self._kubelet_refusals[node] > 0:
            self._kubelet_refusals[node] -= 1
            name = pod["metadata"]["name"]
            message = (
                f"the server could not find the requested resource ( pods/{subresource} {name})"
            )
            raise ApiError(404, "NotFound", message, {"name": name, "kind": f"pods/{subresource}"})

    def start_slowly(self) -> None:
        """Refuse the next requests of users without all rights, as an API server that has just started."""
        self._starting = _REFUSALS_AT_START

    def take_refusal_at_start(self) -> bool:
        """Count down the refusals of a server that has just started: it knows no Role. Return False if none is left."""
        self._starting -= 1
        return self._starting >= 0

    def trouble(self, **facts: object) -> None:
        """Let users' requests of a kind fail: see Trouble."""
        self._troubles.append(Trouble(**facts))  # type: ignore[arg-type]

    async def meet(self, request: web.Request, asked: str, name: str) -> web.StreamResponse | None:
        """Make the trouble that is asked for of a user's request: raise ApiError, or return an answer.

        None: it is served as usual.
        """
        self.asked.append(asked)
        for trouble in self._troubles:
            is_meant = re.fullmatch(trouble.request, asked) and re.search(trouble.about, name)
            if not trouble.times or not is_meant:
                continue
            if trouble.after:
                trouble.after -= 1
                continue
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
        """End all faults, and forget what was asked."""
        self._troubles.clear()
        self.asked.clear()
        self._unschedulable.clear()
        self._broken_images.clear()
        self._unbound.clear()
        self._uninstalled.clear()
        self._refusals.clear()
        self._nodes_away.clear()
        self._hosts_cut.clear()
        self._starting = 0
        self._kubelet_refusals.clear()
        self._too_large = 0

    def served(self) -> list[Resource]:
        """Return the kinds that are installed."""
        return [resource for resource in RESOURCES if resource.kind not in self._uninstalled]

    def check_creation(self, obj: Object) -> None:
        """Raise ApiError 403 where objects of this kind are refused."""
        message = self._refusals.get(obj["kind"])
        if message:
            name = obj["metadata"].get("name") or obj["metadata"].get("generateName")
            what = BY_KIND[obj["kind"]].group_resource
            raise forbidden(f'{what} "{name}" is forbidden: {message}')

    def is_unschedulable(self, pod: str) -> bool:
        """True if no node is to fit a pod, by its `namespace/name`."""
        return any(re.search(pattern, pod) for pattern in self._unschedulable)

    def is_unbound(self, claim: str) -> bool:
        """True if a claim is to get no volume, by its `namespace/name`."""
        return any(re.search(pattern, claim) for pattern in self._unbound)

    def image_is_broken(self, image: str) -> bool:
        """True if an image is not to be pulled."""
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
    # After what was written has left.
    request.transport.close()
    return response


def evict(store: Store, pod: Object, grace_seconds: int | None = None) -> None:
    """Delete a pod the way the eviction API and `kubectl drain` do: marked as a disruption, with its grace period."""
    status = pod.setdefault("status", {})
    message = "Eviction API: evicting"
    if set_condition(status, "DisruptionTarget", "True", "EvictionByEvictionAPI", message):
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
        is_there = pod["spec"].get("nodeName") == node_name
        if is_there and not finished(pod) and not terminating(pod):
            evict(store, pod)


def cut_host(store: Store, faults: Faults, node_name: str, *, evicts: bool) -> None:
    """Do what the control plane does about a node it hears nothing of: at once, and five minutes later (`evicts`)."""
    node = store.get("Node", "", node_name)
    if node is None:
        raise KeyError(f"there is no node {node_name}")
    faults.cut_host(node_name)
    message = "Kubelet stopped posting node status."
    set_condition(node["status"], "Ready", "Unknown", "NodeStatusUnknown", message)
    # For its taint.
    node["spec"]["unschedulable"] = True
    store.touch(node)
    for pod in store.list("Pod"):
        if pod["spec"].get("nodeName") != node_name or finished(pod) or terminating(pod):
            continue
        status = pod.setdefault("status", {})
        # Its containers stay ready, as the kubelet has last said.
        set_condition(status, "Ready", "False")
        if evicts:
            message = "Taint manager: deleting due to NoExecute taint"
            set_condition(status, "DisruptionTarget", "True", "DeletionByTaintManager", message)
        store.touch(pod)
        if evicts:
            store.delete(pod, None)
