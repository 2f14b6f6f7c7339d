"""`kubectl logs`: the CRI log files of a container, whole or tailed, once or followed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from standin.api.responses import flag, hung_up
from standin.node.container import Container
from standin.state.errors import bad_request
from standin.state.objects import Object, finished, name_of

# How often a followed file is looked at.
_FOLLOW_SECONDS = 0.05
# That a line lacks, besides its end, whose kubelet went.
_TORN_BYTES = 3


async def send_log(
    request: web.Request,
    pod: Object,
    name: str,
    container: Container | None,
    is_cut: Callable[[], bool],
) -> web.StreamResponse:
    """Stream a container's log. ApiError 400 when it has not started, or has no previous run.

    `is_cut` is true once the pod's kubelet has gone, which cuts the stream: within a line, and the API server then ends
    its answer as if that were all.
    """
    if container is None:
        raise bad_request(
            f'container "{name}" in pod "{name_of(pod)}" is waiting to start: ContainerCreating'
        )
    path, attempt = _find(request, pod, name, container)
    if not path.exists():
        gone = f"unable to retrieve container logs for {container.status.get('containerID')}"
        return web.Response(text=gone)
    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
    await response.prepare(request)
    plain = _Plain(request.query.get("sinceTime") or "", flag(request, "timestamps"))
    try:
        with path.open("rb") as file:
            file.seek(_tail_start(path, request.query.get("tailLines")))
            while not hung_up(request):
                if is_cut():
                    text = plain.text(file.read())
                    await response.write(text[: -_TORN_BYTES - 1])
                    break
                # Asked before reading: what is written after the read is seen in the next round.
                is_newest = container.status["restartCount"] == attempt
                is_running = is_newest and "running" in container.status["state"]
                text = plain.text(file.read())
                if text:
                    await response.write(text)
                if not is_running or not flag(request, "follow"):
                    break
                await asyncio.sleep(_FOLLOW_SECONDS)
        await response.write_eof()
    # The client hung up.
    except ConnectionError:
        pass
    return response


async def send_fake_log(request: web.Request, pod: Object) -> web.StreamResponse:
    """Stream the log of a pod without processes: one line, and nothing more until it ends."""
    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
    await response.prepare(request)
    line = f"{pod['metadata']['creationTimestamp']} {name_of(pod)} is here\n"
    await response.write(line.encode())
    while flag(request, "follow") and not finished(pod) and not hung_up(request):
        await asyncio.sleep(_FOLLOW_SECONDS)
    await response.write_eof()
    return response


def _find(request: web.Request, pod: Object, name: str, container: Container) -> tuple[Path, int]:
    """Return the log file asked for, and the attempt (restart count) that wrote it."""
    about = f'container "{name}" in pod "{name_of(pod)}"'
    attempt = container.status["restartCount"]
    is_between = "waiting" in container.status["state"] and not container.log_file(attempt).exists()
    if flag(request, "previous"):
        if attempt == 0:
            raise bad_request(f"previous terminated {about} not found")
        attempt -= 1
    # Between two runs the last one is shown.
    elif attempt and is_between:
        attempt -= 1
    path = container.log_file(attempt)
    if not path.exists() and "terminated" not in container.status["state"]:
        reason = container.status["state"].get("waiting", {}).get("reason", "ContainerCreating")
        raise bad_request(f"{about} is waiting to start: {reason}")
    return path, attempt


def _tail_start(path: Path, tail_lines: str | None) -> int:
    """Return the byte at which the last lines begin."""
    if tail_lines is None:
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    skipped = lines[: max(0, len(lines) - int(tail_lines))]
    return len(b"".join(skipped))


class _Plain:
    """CRI entries as the text the container wrote, with a time before each line if `timestamps`.

    10:15:00 stdout P Hel      the line goes on in the next entry
    10:15:00 stdout F lo       the line ends: "10:15:00 Hello"
    """

    def __init__(self, since: str, timestamps: bool) -> None:
        self._since = since.rstrip("Z")
        self._timestamps = timestamps
        self._within_line = False

    def text(self, entries: bytes) -> bytes:
        """Return the next entries as text."""
        parts = []
        for entry in entries.splitlines():
            stamp, _, tag, text = entry.split(b" ", 3)
            if stamp.decode() >= self._since:
                if self._timestamps and not self._within_line:
                    parts.append(stamp + b" ")
                parts.append(text)
                if tag == b"F":
                    parts.append(b"\n")
            self._within_line = tag == b"P"
        return b"".join(parts)
