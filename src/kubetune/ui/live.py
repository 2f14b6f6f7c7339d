"""Server-sent events: an open page learns that its run has changed, and loads itself again.

Only a number is sent. So the content of a page is made in one place.
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

from kubetune.library.sweep.sweep_list import sweep_state
from kubetune.library.sweep.sweep_record import read_record, read_search
from kubetune.ui.run_index import signature
from kubetune.ui.site import runs_of, site_of
from kubetune.ui.sweeps import sweep_of

_POLL_SECONDS = 1.0  # between two looks, if they are quick
_QUIET_SECONDS = 15.0  # after which a line is sent so that the connection stays open


def run_news(request: Request) -> Response:
    """Send a number each time that the files, heartbeats or logs of the page's runs change.

    A long run's numbers are read in parts, and each part is news too.
    """
    run_dirs = runs_of(request)
    site = site_of(request)

    def look() -> int:
        # Any change of any part gives another checksum.
        state: list[Any] = [site.records.read_on(run_dirs)]
        for run_dir in run_dirs:
            state += [signature(run_dir), site.jobs.is_running(site.records.name_of(run_dir))]
            # Logs grow with each line, and heartbeats lie among them.
            logs = run_dir / "logs"
            if logs.is_dir():
                for path in sorted(logs.iterdir()):
                    facts = path.stat()
                    state.append((facts.st_size, facts.st_mtime_ns))

        return crc32(repr(state).encode())

    return _stream(look)


def sweep_news(request: Request) -> Response:
    """Send a number each time that something of the page's sweep changes."""
    folder = sweep_of(request)

    def look() -> int:
        # Seconds are left out: they change at every look, and say nothing new.
        search = read_search(folder)
        record = read_record(folder)
        runs = [(run.state, run.step, run.value) for run in record.runs]
        states = [(trial.state, trial.rung, trial.value) for trial in record.trials]
        state = sweep_state(folder, record, search)
        return crc32(repr((runs, states, state, record.importance)).encode())

    return _stream(look)


def all_news(request: Request) -> Response:
    """Send a number each time that a run of the folder changes, comes or goes."""
    records = site_of(request).records

    def look() -> int:
        # The contents of the table of runs.
        state = []
        for run in records.listed():
            facts = ("dir", "name", "note", "tags", "archived", "state", "step", "loss")
            state.append([run[key] for key in facts])
        state += [list(sweep.values()) for sweep in records.sweeps()]
        return crc32(repr(state).encode())

    return _stream(look)


def _stream(look: Callable[[], int]) -> Response:
    """Send what `look` returns, each time that it changes."""

    async def events() -> AsyncIterator[bytes]:
        # Sent at once, so that a page knows what it shows.
        current = await to_thread.run_sync(look)
        yield f"event: news\ndata: {current}\n\n".encode()
        sent_at = time.monotonic()
        while True:
            started = time.monotonic()
            try:
                # In a thread: looking reads files, and other pages wait for the loop.
                new = await to_thread.run_sync(look)
            except OSError:  # a file that was deleted meanwhile
                new = current
            if new != current:
                current = new
                yield f"event: news\ndata: {current}\n\n".encode()
                sent_at = time.monotonic()
            elif time.monotonic() - sent_at > _QUIET_SECONDS:
                yield b": still here\n\n"
                sent_at = time.monotonic()

            # However long a look takes, at most a quarter of the time is spent on looks.
            await asyncio.sleep(max(_POLL_SECONDS, 3 * (time.monotonic() - started)))

    return StreamingResponse(
        events(), media_type="text/event-stream", headers={"x-accel-buffering": "no"}
    )
