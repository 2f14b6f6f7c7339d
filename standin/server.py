"""The parts put together: store, kubelet, controllers and API in one event loop; and the API's outages."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys

from aiohttp import web

from standin.api.application import Api
from standin.controllers import reconcile_forever
from standin.controllers.context import Context
from standin.faults import Faults
from standin.node.kubelet import Kubelet
from standin.settings import Settings
from standin.state.objects import Object
from standin.state.store import Store

_END_SECONDS = 5.0


async def serve(settings: Settings, listener: socket.socket, url: str) -> None:
    """Serve on a bound socket until stdin is closed, which also happens when the process that started us dies."""
    store = Store()
    faults = Faults()
    kubelet = Kubelet(store, settings, faults)
    await kubelet.start()
    for obj in _first_objects(settings):
        store.create(obj)
    application = Api(store, kubelet, faults, settings).application()
    tasks = [
        asyncio.create_task(reconcile_forever(Context(store, settings, faults), kubelet)),
        asyncio.create_task(_listen(application, listener, faults)),
        asyncio.create_task(_until_stdin_closes()),
    ]
    print(f"ready {url}", flush=True)
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    await _end()


async def _end() -> None:
    """Cancel what is left. Should a pod's task hang in that, the process ends all the same, and its pods with it."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if not left:
        return
    for task in left:
        task.cancel()
    _, stuck = await asyncio.wait(left, timeout=_END_SECONDS)
    if stuck:
        print(f"ended without waiting for {stuck}", file=sys.stderr, flush=True)
        os._exit(0)


def _first_objects(settings: Settings) -> list[Object]:
    """Return the namespaces and nodes that every cluster has."""
    objects = []
    for name in ("default", "kube-system"):
        objects.append(_object("Namespace", name, {"kubernetes.io/metadata.name": name}))
        objects[-1]["status"] = {"phase": "Active"}
    for index in range(settings.nodes):
        name = f"node-{index}"
        labels = {
            "kubernetes.io/hostname": name,
            "topology.kubernetes.io/zone": f"zone-{index}",
            "nvidia.com/gpu.memory": "81559",  # of an H100, by NVIDIA's feature discovery
        }
        size = {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": str(settings.gpus)}
        node = _object("Node", name, labels)
        node["spec"] = {}
        node["status"] = {
            "capacity": size,
            "allocatable": size,
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        objects.append(node)
    return objects


def _object(kind: str, name: str, labels: dict[str, str]) -> Object:
    """Return an object of the core."""
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "labels": labels}}


async def _listen(application: web.Application, listener: socket.socket, faults: Faults) -> None:
    """Answer requests; from SIGUSR1 to SIGUSR2 drop every connection and refuse new ones.

    What comes back is as a server that has just started, which knows no Role at first.
    """
    leave = asyncio.Event()
    come_back = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, leave.set)
    loop.add_signal_handler(signal.SIGUSR2, come_back.set)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    while True:
        # A copy, for closing the site closes its socket; shutdown is what ends the listening of both.
        site = web.SockSite(runner, listener.dup())
        await site.start()
        await leave.wait()
        leave.clear()
        await site.stop()
        assert runner.server is not None
        for connection in list(runner.server.connections):
            connection.force_close()
            if connection.transport is not None:
                connection.transport.abort()
        listener.shutdown(socket.SHUT_RD)
        await come_back.wait()
        come_back.clear()
        faults.start_slowly()


async def _until_stdin_closes() -> None:
    """Wait until nobody holds the other end of stdin."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
