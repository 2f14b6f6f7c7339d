"""An object store whose requests end: fsspec's file system, but what nothing comes of for too long is given up.

The time limits of its libraries begin anew with every byte, so that a store that drips would be waited for without end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from typing import Any

ANSWER_SECONDS = 180.0
"""For any request but those that move a file."""

FILE_SECONDS = 1800.0
"""For LEAST_BYTES of a file; a library may tell of ten parts of 50 MB only when they are through, over a slow line."""

LEAST_BYTES = 2**16


class PatientStore:
    """A file system of fsspec with the same methods; each may raise TimeoutError besides what its library raises."""

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
        from fsspec.callbacks import Callback

        last, counted = time.monotonic(), 0

        def note(_: int, value: int, **__: Any) -> None:
            nonlocal last, counted
            if value >= counted + LEAST_BYTES:
                last, counted = time.monotonic(), value

        if moves:
            settings["callback"] = Callback(hooks={"arrival": note})
        method = getattr(
            self._file_system, f"_{name}"
        )  # the coroutine: unlike the method without _, it can be ended
        asked = asyncio.run_coroutine_threadsafe(
            method(*arguments, **settings), self._file_system.loop
        )
        patience = FILE_SECONDS if moves else ANSWER_SECONDS
        try:
            while not asked.done():
                if (left := last + patience - time.monotonic()) <= 0:
                    raise TimeoutError(
                        f"less than {LEAST_BYTES:,} bytes of {moves} in {patience:,g} s"
                        if moves
                        else f"no whole answer about {arguments[0]} in {patience:,g} s"
                    )
                wait([asked], left)
            return asked.result()
        finally:
            asked.cancel()
