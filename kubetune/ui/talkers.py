"""Models that are talked to on pages: a process for each run, which holds its model once for both sides.

There are few at a time, and they end with the pages that are open on them: the server itself never loads a model.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kubetune.base import logs, processes

MOST_MODELS = 2
"""Models that are held at once; another one ends the one that was asked least lately."""
_LINE_BYTES = 1 << 20
_BEAT_SECONDS, _PATIENCE_SECONDS = 10.0, 5.0


class Talker:
    """The process of one model."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self.pages = 0
        self.facts: dict[str, Any] = {}

    async def load(self) -> dict[str, Any]:
        """Facts on the model once it is loaded, or `error`."""
        async with self._lock:
            if self._process is None or self._process.returncode is not None:
                command = processes.module("kubetune.ui.chat_child", str(self._run_dir), "best")
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    limit=_LINE_BYTES,
                )
                self.facts = {}
            if not self.facts:  # also where a page that waited for them was closed
                self.facts = await self._next()
            return self.facts

    async def answer(self, asked: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Pieces of one answer, and its end. Whoever stops listening ends it."""
        facts = await self.load()
        if "error" in facts:
            yield {"end": True, "error": facts["error"]}
            return
        async with self._lock:
            assert self._process is not None
            assert self._process.stdin is not None
            over = False
            try:
                self._process.stdin.write(json.dumps(asked).encode() + b"\n")
                await self._process.stdin.drain()
                while not over:
                    found = await self._next()
                    over = "end" in found or "error" in found
                    yield found if "error" not in found else {**found, "end": True}
            except (BrokenPipeError, ConnectionResetError):
                over = True
                yield {
                    "end": True,
                    "error": "the process of the model ended; ask again to load it anew",
                }
            finally:
                if not over:
                    await asyncio.shield(self._drain())

    async def _drain(self) -> None:
        """End an answer that nobody listens to, and read what is left of it."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
        while not {"end", "error"} & (await self._next()).keys():
            pass

    async def _next(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            code = await self._process.wait()
            return {
                "error": f"the process of the model ended with status {code}; the terminal of kubetune ui says why"
            }
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        """End the process, and give back the memory of its model."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()


class Talkers:
    """Models that are talked to, by run directory, the one asked last at the end."""

    def __init__(self) -> None:
        self._open: dict[Path, Talker] = {}

    def get(self, run_dir: Path, keep: Sequence[Path] = ()) -> Talker:
        """The model of a run; where there are too many, one that is not of `keep` ends."""
        found = self._open.pop(run_dir, None) or Talker(run_dir)
        while len(self._open) >= MOST_MODELS:
            oldest = next(
                (place for place in self._open if place not in keep), next(iter(self._open))
            )
            self._open.pop(oldest).end()
        self._open[run_dir] = found
        return found

    async def stay(self, run_dirs: Sequence[Path]) -> AsyncIterator[bytes]:
        """Beats for a page, each model's facts once it is loaded; models end some seconds after their last page."""
        talkers = {run_dir: self.get(run_dir, run_dirs) for run_dir in run_dirs}
        for talker in talkers.values():
            talker.pages += 1
        try:
            for place, talker in enumerate(talkers.values()):
                yield _event("model", {"side": place, **await talker.load()})
            while True:
                await asyncio.sleep(_BEAT_SECONDS)
                yield b": still here\n\n"
        finally:
            for run_dir, talker in talkers.items():
                talker.pages -= 1
                asyncio.get_running_loop().call_later(
                    _PATIENCE_SECONDS, self._leave, run_dir, talker
                )

    def _leave(self, run_dir: Path, talker: Talker) -> None:
        if not talker.pages:
            talker.end()
            if self._open.get(run_dir) is talker:
                del self._open[run_dir]

    def end(self) -> None:
        """End all of them."""
        for talker in self._open.values():
            talker.end()


def _event(name: str, facts: Mapping[str, Any]) -> bytes:
    return f"event: {name}\ndata: {logs.scrub(json.dumps(facts))}\n\n".encode()
