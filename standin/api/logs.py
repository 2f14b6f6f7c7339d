"""`kubectl logs`: the CRI log files of a container, whole or tailed, once or followed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from standin.api.responses import flag, hung_up
from standin.node.container import Container
from standin.state.errors import bad_request
from standin.state.objects import Object, finished, name_of, now

_FOLLOW_SECONDS = 0.05  # how often a followed file is looked at
_TORN_BYTES = 3  # that a line lacks, besides its end, whose kubelet went


async def send_log(
    request: web.Request,
    pod: Object,
    name: str,
    container: Container | None,
    is_away: Callable[[], bool],
) -> web.StreamResponse:
    """Stream a container's log; ApiError 400 when it has not started, or has no previous run.

    `is_away` is true while the pod's kubelet is away, which cuts the stream: within a line, and the API server then ends
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
    since = request.query.get("sinceTime") or ""
    if "sinceSeconds" in request.query:
        since = now(-float(request.query["sinceSeconds"]))
    plain = _Plain(since, flag(request, "timestamps"))
    try:
        with path.open("rb") as file:
            file.seek(_tail_start(path, request.query.get("tailLines")))
            while not hung_up(request):
                if is_away():
                    text = plain.text(file.read())
                    await response.write(text[: -_TORN_BYTES - 1])
                    break
                # asked before reading: what is written after the read is seen in the next round
                running = (
                    container.status["restartCount"] == attempt
                    and "running" in container.status["state"]
                )
                if text := plain.text(file.read()):
                    await response.write(text)
                if not (running and flag(request, "follow")):
                    break
                await asyncio.sleep(_FOLLOW_SECONDS)
        await response.write_eof()
    except ConnectionError:
        pass  # the client hung up
    return response


async def send_fake_log(request: web.Request, pod: Object) -> web.StreamResponse:
    """The log of a pod without processes: one line, and nothing more until it ends."""
    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
    await response.prepare(request)
    await response.write(
        f"{pod['metadata']['creationTimestamp']} {name_of(pod)} is here\n".encode()
    )
    while flag(request, "follow") and not finished(pod) and not hung_up(request):
        await asyncio.sleep(_FOLLOW_SECONDS)
    await response.write_eof()
    return response


def _find(request: web.Request, pod: Object, name: str, container: Container) -> tuple[Path, int]:
    """The log file asked for, and the attempt (restart count) that wrote it."""
    about = f'container "{name}" in pod "{name_of(pod)}"'
    attempt = container.status["restartCount"]
    if flag(request, "previous"):
        if attempt == 0:
            raise bad_request(f"previous terminated {about} not found")
        attempt -= 1
    elif (
        "waiting" in container.status["state"]
        and attempt
        and not container.log_file(attempt).exists()
    ):
        attempt -= 1  # between two runs the last one is shown
    path = container.log_file(attempt)
    if not path.exists() and "terminated" not in container.status["state"]:
        reason = container.status["state"].get("waiting", {}).get("reason", "ContainerCreating")
        raise bad_request(f"{about} is waiting to start: {reason}")
    return path, attempt


def _tail_start(path: Path, tail_lines: str | None) -> int:
    if tail_lines is None:
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    return sum(map(len, lines[: max(0, len(lines) - int(tail_lines))]))


class _Plain:
    """CRI entries as the text the container wrote, with a time before each line if `timestamps`."""

    def __init__(self, since: str, timestamps: bool) -> None:
        self._since, self._timestamps, self._within_line = since.rstrip("Z"), timestamps, False

    def text(self, entries: bytes) -> bytes:
        out = []
        for entry in entries.splitlines():
            stamp, _, tag, text = entry.split(b" ", 3)
            if stamp.decode() >= self._since:
                with_stamp = self._timestamps and not self._within_line
                out += [stamp + b" " if with_stamp else b"", text, b"\n" if tag == b"F" else b""]
            self._within_line = tag == b"P"
        return b"".join(out)
