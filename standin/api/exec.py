"""`kubectl exec`: a command in a running container over the v5 (or v4) channel protocol. `kubectl cp` is this and tar.

Every WebSocket message starts with its channel: 0 stdin, 1 stdout, 2 stderr, 3 the final Status, 255 closes a channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process

from aiohttp import WSMsgType, web

from standin.api.responses import flag
from standin.node.container import Container
from standin.state.errors import ApiError, bad_request
from standin.state.objects import Object

_STDIN = 0
_STDOUT = 1
_STDERR = 2
_STATUS = 3
_CLOSE = 255
_CHUNK_BYTES = 32_768


async def run_exec(request: web.Request, container: Container) -> web.WebSocketResponse:
    """Run the command to its end, or kill it when the client goes away."""
    if "websocket" not in request.headers.get("Upgrade", "").lower():
        raise bad_request("Upgrade request required (WebSocket only, SPDY is not spoken here)")
    if not any(flag(request, stream) for stream in ("stdin", "stdout", "stderr")):
        raise bad_request("you must specify at least 1 of stdin, stdout, stderr")
    socket = web.WebSocketResponse(
        protocols=("v5.channel.k8s.io", "v4.channel.k8s.io"), max_msg_size=0
    )
    await socket.prepare(request)
    argv = request.query.getall("command")
    if not container.has_program(argv[0]):
        await _send_status(socket, _no_program(argv[0]))
        return socket
    terminal: int | None = None
    if flag(request, "tty"):
        process, terminal, outputs = await _start_on_terminal(container, argv)
    else:
        stdin = DEVNULL
        if flag(request, "stdin"):
            stdin = PIPE
        process = await container.exec(argv, stdin=stdin, stdout=PIPE, stderr=PIPE)
        assert process.stdout is not None
        assert process.stderr is not None
        outputs = [(process.stdout, _STDOUT), (process.stderr, _STDERR)]
    # Both ways at once: a command may wait for input before it prints.
    receiver = asyncio.create_task(_receive(socket, process, terminal))
    await asyncio.gather(*(_send(socket, stream, channel) for stream, channel in outputs))
    code = await process.wait()
    if terminal is not None:
        os.close(terminal)
    if not socket.closed:
        await _send_status(socket, _status(code))
    receiver.cancel()
    return socket


async def _start_on_terminal(
    container: Container, argv: list[str]
) -> tuple[Process, int, list[tuple[asyncio.StreamReader, int]]]:
    """Start a command on a terminal; return it, our end of the terminal, and what comes out of that."""
    terminal, inside = os.openpty()
    process = await container.exec(argv, stdin=inside, stdout=inside, stderr=inside)
    os.close(inside)
    reader = asyncio.StreamReader()
    pipe = os.fdopen(os.dup(terminal), "rb")
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    return process, terminal, [(reader, _STDOUT)]


async def _send_status(socket: web.WebSocketResponse, status: Object) -> None:
    """Say how the command ended, and close."""
    await socket.send_bytes(bytes([_STATUS]) + json.dumps(status).encode())
    await socket.close()


async def _send(socket: web.WebSocketResponse, stream: asyncio.StreamReader, channel: int) -> None:
    """Send what a command prints, to its end."""
    # The client hung up, or a terminal ended with EIO.
    with contextlib.suppress(OSError):
        while data := await stream.read(_CHUNK_BYTES):
            await socket.send_bytes(bytes([channel]) + data)


async def _receive(socket: web.WebSocketResponse, process: Process, terminal: int | None) -> None:
    """Pass on what the client sends until it hangs up; a command that still runs then is killed."""
    async for message in socket:
        if message.type != WSMsgType.BINARY or not message.data:
            continue
        channel = message.data[0]
        data = message.data[1:]
        if channel == _STDIN and terminal is not None:
            os.write(terminal, data)
        elif channel == _STDIN and process.stdin and data:
            # The command may have closed its stdin.
            with contextlib.suppress(ConnectionError):
                process.stdin.write(data)
                await process.stdin.drain()
        elif channel == _CLOSE and process.stdin:
            process.stdin.close()
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _no_program(program: str) -> Object:
    """Return the Status of a command that the runtime could not start, in the words of containerd and runc."""
    lookup = f"stat {program}: no such file or directory"
    if "/" not in program:
        lookup = "executable file not found in $PATH"
    return ApiError(
        500,
        "InternalError",
        "Internal error occurred: error executing command in container: failed to exec in container: "
        'failed to start exec "3f2a": OCI runtime exec failed: exec failed: unable to start container '
        f'process: exec: "{program}": {lookup}: unknown',
    ).status()


def _status(code: int) -> Object:
    """Return the Status of a command that ended with an exit code, or -N for a signal."""
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    cause = {"reason": "ExitCode", "message": str(code if code > 0 else 128 - code)}
    return {
        "metadata": {},
        "status": "Failure",
        "reason": "NonZeroExitCode",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "details": {"causes": [cause]},
    }
