"""An object store whose requests end: fsspec's file system, with a limit of time for each request.

The time limits of its libraries begin anew with every byte, so a store that sends a byte now and then is waited for
without end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from typing import Any

# For a request that moves no file.
ANSWER_SECONDS = 180.0

# For each LEAST_BYTES of a file. A library may report ten parts of 50 MB only when all of them are through.
FILE_SECONDS = 1800.0
LEAST_BYTES = 2**16


class PatientStore:
    """A file system of fsspec. Its methods raise TimeoutError besides what the library raises."""

    def __init__(self, file_system: Any) -> None:
        self._file_system = file_system

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._ask, name)

    def get_file(self, place: str, path: str) -> None:
        """Copy a file of the store to a local path, for as long as bytes keep coming."""
        self._ask("get_file", place, path, moves=place)

    def put_file(self, path: str, place: str) -> None:
        """Copy a local file into the store, for as long as bytes keep going."""
        self._ask("put_file", path, place, moves=place)

    def _ask(self, name: str, *arguments: Any, moves: str = "", **settings: Any) -> Any:
        """Call a method of the file system. `moves` names the file that it copies, if it copies one."""
        from fsspec.callbacks import Callback

        patience = FILE_SECONDS if moves else ANSWER_SECONDS
        progressed_at = time.monotonic()
        counted = 0  # bytes at that time

        def note(_: int, value: int, **__: Any) -> None:
            nonlocal progressed_at, counted
            if value >= counted + LEAST_BYTES:
                progressed_at = time.monotonic()
                counted = value

        if moves:
            settings["callback"] = Callback(hooks={"arrival": note})
        # The coroutine `_get_file`, since it can be cancelled; the method `get_file` cannot.
        coroutine = getattr(self._file_system, f"_{name}")(*arguments, **settings)
        request = asyncio.run_coroutine_threadsafe(coroutine, self._file_system.loop)
        try:
            while not request.done():
                left = progressed_at + patience - time.monotonic()
                if left <= 0 and moves:
                    raise TimeoutError(
                        f"less than {LEAST_BYTES:,} bytes of {moves} in {patience:,g} s"
                    )
                if left <= 0:
                    raise TimeoutError(f"no whole answer about {arguments[0]} in {patience:,g} s")
                wait([request], left)
            return request.result()
        finally:
            request.cancel()
