"""The models of the chat page: a process for each run with a model that answers with and without its adapter.

There are few at a time, and they end with the pages that use them. The server itself loads no model.
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
from kubetune.errors import KubetuneError
from kubetune.result.inference.requirements import require_result

MOST_MODELS = 2  # held at once; a further one ends the one that was used longest ago
_LINE_BYTES = 1 << 20  # of an answer's longest line
_BEAT_SECONDS = 10.0  # between lines that keep a stream open
_PATIENCE_SECONDS = 5.0  # for which a model stays after its last page, which may be loading again


class Talker:
    """The process of one model (chat_child)."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()  # one question at a time
        self.pages = 0  # that are open on it
        self.facts: dict[str, Any] = {}  # on the model; empty until it is loaded

    async def load(self) -> dict[str, Any]:
        """Load the model if it is not loaded. Return facts on it, or its `error`."""
        async with self._lock:
            if self._process is None or self._process.returncode is not None:
                # A run without a result is refused at once; loading would say it after many seconds.
                try:
                    require_result(self._run_dir)
                except KubetuneError as error:
                    return {"error": str(error)}
                command = processes.module(
                    "kubetune.ui.chat.chat_child", str(self._run_dir), "best"
                )
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    limit=_LINE_BYTES,
                )
                self.facts = {}

            # Not in the `if` above: a page that waited for the facts may have been closed.
            if not self.facts:
                self.facts = await self._next()
            return self.facts

    async def answer(self, question: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the pieces of an answer, and its end. A caller that stops reading ends it."""
        facts = await self.load()
        if "error" in facts:
            yield {"end": True, "error": facts["error"]}
            return
        async with self._lock:
            assert self._process is not None
            assert self._process.stdin is not None
            # A caller that stops reading closes this generator, which runs `finally`.
            is_over = False
            try:
                self._process.stdin.write(json.dumps(question).encode() + b"\n")
                await self._process.stdin.drain()
                while not is_over:
                    piece = await self._next()
                    if "error" in piece:
                        piece["end"] = True
                    is_over = "end" in piece
                    yield piece
            except (BrokenPipeError, ConnectionResetError):
                is_over = True
                reason = "the process of the model ended; ask again to load it anew"
                yield {"end": True, "error": reason}
            finally:
                if not is_over:
                    await asyncio.shield(self._drain())

    async def _drain(self) -> None:
        """End an answer that nobody reads, and skip what is left of it."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
        # The child still writes the end of the answer that was broken off.
        while not {"end", "error"} & (await self._next()).keys():
            pass

    async def _next(self) -> dict[str, Any]:
        """Return the next line of the process, or an error if it has ended."""
        # The process writes lines of JSON. An empty line is the end of the pipe.
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            code = await self._process.wait()
            reason = "the terminal of kubetune ui says why"
            return {"error": f"the process of the model ended with status {code}; {reason}"}
        return dict(json.loads(line))

    def end(self) -> None:
        """End the process, which frees the memory of its model."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()


class Talkers:
    """The models that are held, by run directory, the one used last at the end."""

    def __init__(self) -> None:
        self._open: dict[Path, Talker] = {}

    def get(self, run_dir: Path, keep: Sequence[Path] = ()) -> Talker:
        """Return the model of a run. If there are too many, one that is not in `keep` ends."""
        # Taken out and put back, so that it is last.
        talker = self._open.pop(run_dir, None) or Talker(run_dir)
        while len(self._open) >= MOST_MODELS:
            # The first was used longest ago. A page with more models than may be held loses one of its own.
            candidates = [other for other in self._open if other not in keep] or list(self._open)
            self._open.pop(candidates[0]).end()
        self._open[run_dir] = talker
        return talker

    async def stay(self, run_dirs: Sequence[Path]) -> AsyncIterator[bytes]:
        """Yield each model's facts once it is loaded, then lines that keep the stream open.

        The stream ends when the page is closed; its models end some seconds later.
        """
        # A page that is loaded again opens its stream before the old one ends, so models are counted by pages.
        talkers = {run_dir: self.get(run_dir, run_dirs) for run_dir in run_dirs}
        for talker in talkers.values():
            talker.pages += 1
        try:
            for side, talker in enumerate(talkers.values()):
                yield _event("model", {"side": side, **await talker.load()})
            while True:
                await asyncio.sleep(_BEAT_SECONDS)
                yield b": still here\n\n"
        finally:
            for run_dir, talker in talkers.items():
                talker.pages -= 1
                asyncio.get_running_loop().call_later(
                    _PATIENCE_SECONDS,
                    self._leave,
                    run_dir,
                    talker,
                )

    def _leave(self, run_dir: Path, talker: Talker) -> None:
        """End a model on which no page is open any more."""
        if not talker.pages:
            talker.end()
            if self._open.get(run_dir) is talker:
                del self._open[run_dir]

    def end(self) -> None:
        """End all of them."""
        for talker in self._open.values():
            talker.end()


def _event(name: str, facts: Mapping[str, Any]) -> bytes:
    """Return a server-sent event. JSON has no line breaks, which would end it early."""
    return f"event: {name}\ndata: {logs.scrub(json.dumps(facts))}\n\n".encode()
