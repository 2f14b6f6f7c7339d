"""`kubectl port-forward`: SPDY in a WebSocket; each connection is a pair of streams, one for data, one for errors."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from aiohttp import WSMsgType, web

from standin.api import spdy
from standin.node import runtime
from standin.state.errors import bad_request

_PROTOCOL = "SPDY/3.1+portforward.k8s.io"
_CHUNK_BYTES = 32_768


async def forward_ports(request: web.Request, pid: int | None) -> web.WebSocketResponse:
    """Serve one client until it hangs up; ports are those of the network namespace of process `pid`."""
    if "websocket" not in request.headers.get("Upgrade", "").lower():
        raise bad_request("Upgrade request required (SPDY is spoken inside a WebSocket only)")
    channel = web.WebSocketResponse(protocols=(_PROTOCOL,), max_msg_size=0)
    await channel.prepare(request)
    tunnel = _Tunnel(channel, pid)
    try:
        async for message in channel:
            if message.type == WSMsgType.BINARY:
                await tunnel.receive(message.data)
    finally:
        tunnel.close()
    return channel


class _Tunnel:
    """The streams of one client, and their connections into the pod."""

    def __init__(self, channel: web.WebSocketResponse, pid: int | None) -> None:
        self._channel = channel
        self._pid = pid
        self._reader = spdy.Reader()
        self._writer = spdy.Writer()
        self._errors: dict[str, int] = {}  # error stream of each request id
        self._connections: dict[int, asyncio.StreamWriter] = {}  # into the pod, by data stream
        self._tasks: set[asyncio.Task[None]] = set()

    async def receive(self, data: bytes) -> None:
        """Do what the next frames ask for."""
        for frame in self._reader.feed(data):
            if frame.type == spdy.SYN_STREAM:
                await self._open(*self._reader.opened_stream(frame))
            elif frame.type == spdy.PING:
                await self._send(spdy.control_frame(spdy.PING, frame.payload))
            elif frame.type == spdy.RST_STREAM:
                self._drop(int.from_bytes(frame.payload[:4], "big"))
            elif frame.type is None and frame.stream in self._connections:
                await self._pass_on(frame)

    def close(self) -> None:
        """End all connections."""
        for task in self._tasks:
            task.cancel()
        for stream in list(self._connections):
            self._drop(stream)

    async def _open(self, stream: int, headers: dict[str, str]) -> None:
        """Accept a stream; with the second one of a request connect to the port."""
        await self._send(self._writer.reply(stream))
        request = headers["requestid"]
        if headers["streamtype"] == "error":
            self._errors[request] = stream
            return
        errors = self._errors.pop(request)
        try:
            reader, self._connections[stream] = await _connect(self._pid, int(headers["port"]))
        except OSError as error:
            message = f"failed to connect to localhost:{headers['port']} inside the pod: {error}"
            await self._send(spdy.data_frame(errors, message.encode(), spdy.FIN))
            await self._send(spdy.data_frame(stream, b"", spdy.FIN))
            return
        task = asyncio.create_task(self._answer(reader, stream, errors))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, reader: asyncio.StreamReader, stream: int, errors: int) -> None:
        """Bring what the pod sends to the client, until it has no more."""
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                await self._send(spdy.data_frame(stream, data))
            await self._send(spdy.data_frame(stream, b"", spdy.FIN))
            await self._send(spdy.data_frame(errors, b"", spdy.FIN))

    async def _pass_on(self, frame: spdy.Frame) -> None:
        """Bring what the client sends to the pod."""
        writer = self._connections[frame.stream]
        # The pod may have closed its end; the client is told by _answer.
        with contextlib.suppress(OSError):
            writer.write(frame.payload)
            if frame.flags & spdy.FIN:
                writer.write_eof()
            await writer.drain()

    def _drop(self, stream: int) -> None:
        writer = self._connections.pop(stream, None)
        if writer is not None:
            writer.close()

    async def _send(self, frame: bytes) -> None:
        await self._channel.send_bytes(frame)


async def _connect(pid: int | None, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a connection to a port on the pod's own loopback."""
    # A socket stays in the namespace where it was made; a pod without one of its own is in this one.
    with contextlib.nullcontext() if pid is None else runtime.network_of(pid):
        inside = socket.socket()
    inside.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(inside, ("127.0.0.1", port))
    except OSError:
        inside.close()
        raise
    return await asyncio.open_connection(sock=inside)
