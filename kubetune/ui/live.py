"""News by server-sent events: a page that is open hears that its run has changed, and fetches itself anew.

All that is sent is a number; what a page shows is made in one place only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any
from zlib import crc32

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kubetune.ui.records import signature
from kubetune.ui.site import runs_of, site_of

_LOOK_SECONDS, _QUIET_SECONDS = 1.0, 15.0


def run_news(request: Request) -> Response:
    """A number each time that the files of runs, their beats or logs have changed, or more of a long one is read."""
    run_dirs, site = runs_of(request), site_of(request)
    records = site.records

    def look() -> int:
        parts: list[Any] = [records.read_on(run_dirs)]
        for run_dir in run_dirs:
            parts += [signature(run_dir), site.jobs.is_running(records.name_of(run_dir))]
            logs = run_dir / "logs"
            if logs.is_dir():
                parts += [
                    (s.st_size, s.st_mtime_ns)
                    for s in (path.stat() for path in sorted(logs.iterdir()))
                ]
        return crc32(repr(parts).encode())

    return _stream(look)


def all_news(request: Request) -> Response:
    """A number each time that any run of the folder has changed, or one has come or gone."""
    records = site_of(request).records

    def look() -> int:
        return crc32(
            repr(
                [(run["dir"], run["state"], run["step"], run["loss"]) for run in records.listed()]
            ).encode()
        )

    return _stream(look)


def _stream(look: Callable[[], int]) -> Response:
    async def events() -> AsyncIterator[bytes]:
        seen = await to_thread.run_sync(look)
        yield f"event: news\ndata: {seen}\n\n".encode()
        told = time.monotonic()
        while True:
            begun = time.monotonic()
            try:
                now = await to_thread.run_sync(look)
            except OSError:  # a file that went away between two looks
                now = seen
            if now != seen:
                seen, told = now, time.monotonic()
                yield f"event: news\ndata: {seen}\n\n".encode()
            elif time.monotonic() - told > _QUIET_SECONDS:
                told = time.monotonic()
                yield b": still here\n\n"
            # Whatever the looking costs, most of the time nothing is done.
            await asyncio.sleep(max(_LOOK_SECONDS, 3 * (time.monotonic() - begun)))

    return StreamingResponse(
        events(), media_type="text/event-stream", headers={"x-accel-buffering": "no"}
    )
