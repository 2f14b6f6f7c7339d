"""A container's readiness probe: an HTTP request into the pod, again and again until the container answers it well."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket

from standin.node import runtime
from standin.state.objects import Object

# Not the probe's own, which is in seconds: tests should not wait for it.
_PERIOD_SECONDS = 0.1
_TIMEOUT_SECONDS = 5.0


async def wait_until_ready(container: Object, address: str, sandbox_pid: int | None) -> None:
    """Return once the container's `httpGet` probe is answered with a status from 200 to 399."""
    probe = container["readinessProbe"]["httpGet"]
    port = _port(container, probe["port"])
    path = probe.get("path", "/")
    while not await asyncio.to_thread(_is_answered, address, port, path, sandbox_pid):
        await asyncio.sleep(_PERIOD_SECONDS)


def _port(container: Object, port: int | str) -> int:
    """Return a port's number, which a probe may give by the name it has in `ports`."""
    for entry in container.get("ports", []):
        if entry.get("name") == port:
            return int(entry["containerPort"])
    return int(port)


def _is_answered(address: str, port: int, path: str, sandbox_pid: int | None) -> bool:
    """Ask once; True for a good answer."""
    connection = http.client.HTTPConnection(address, port, timeout=_TIMEOUT_SECONDS)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.sock = _connect(address, port, sandbox_pid)
        connection.request("GET", path)
        return 200 <= connection.getresponse().status < 400
    return False


def _connect(address: str, port: int, sandbox_pid: int | None) -> socket.socket:
    """Return a connection to a port of the pod, made in the pod's network namespace if it has one."""
    # A socket stays in the namespace where it was made; only this thread visits that of the pod.
    with contextlib.nullcontext() if sandbox_pid is None else runtime.network_of(sandbox_pid):
        inside = socket.socket()
    inside.settimeout(_TIMEOUT_SECONDS)
    try:
        inside.connect((address, port))
    except OSError:
        inside.close()
        raise
    return inside
