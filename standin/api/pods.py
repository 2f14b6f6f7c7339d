"""Subresources of pods: logs, commands in containers, ports and evictions."""

from __future__ import annotations

from aiohttp import web

from standin import faults
from standin.api.exec import run_exec
from standin.api.logs import send_fake_log, send_log
from standin.api.portforward import forward_ports
from standin.api.responses import SUCCESS, json_response, read_body
from standin.node.fake import is_fake
from standin.node.kubelet import Kubelet
from standin.state.errors import bad_request
from standin.state.objects import Object, containers_of, name_of, namespace_of, phase
from standin.state.store import Store


async def serve_subresource(
    request: web.Request,
    store: Store,
    kubelet: Kubelet,
    faults_in_force: faults.Faults,
    pod: Object,
    subresource: str,
) -> web.StreamResponse:
    """Answer a request about a part of a pod."""
    worker = kubelet.worker(pod)
    if subresource == "eviction":
        options = (await read_body(request)).get("deleteOptions") or {}
        faults.evict(store, pod, options.get("gracePeriodSeconds"))
        return json_response({**SUCCESS, "code": 201}, 201)
    if subresource == "portforward":
        if worker is None or worker.task.done():
            raise bad_request(
                f"unable to forward port because pod is not running. Current status={phase(pod)}"
            )
        return await forward_ports(request, worker.sandbox_pid)

    # The rest is asked of the kubelet, about one container.
    faults_in_force.require_kubelet(pod, subresource)
    names = [container["name"] for container in containers_of(pod["spec"])]
    name = request.query.get("container") or pod["spec"]["containers"][0]["name"]
    if name not in names:
        raise bad_request(f"container {name} is not valid for pod {name_of(pod)}")
    container = worker.containers[name] if worker else None
    if subresource == "log" and is_fake(store, pod):
        return await send_fake_log(request, pod)
    if subresource == "log":
        start = faults_in_force.kubelet_start(pod)

        def is_cut() -> bool:
            is_other = faults_in_force.kubelet_start(pod) != start
            return is_other or faults_in_force.is_kubelet_away(pod)

        return await send_log(request, pod, name, container, is_cut)
    if container is None or container.pid is None:
        where = f"{namespace_of(pod)}/{name_of(pod)}"
        raise bad_request(
            f"cannot exec into container {name} of pod {where}: it is not running ({phase(pod)})"
        )
    return await run_exec(request, container)
