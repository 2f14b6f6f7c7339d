"""An object store whose requests end: fsspec's file system, with a limit of time for each request.

The time limits of its libraries begin anew with every byte, so a store that sends a byte now and then is waited for
without end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# For a request that moves no file.
ANSWER_SECONDS = 180.0
# The slowest that a file may be moved, beyond that time.
LEAST_BYTES_PER_SECOND = 50_000


class PatientStore:
    """A file system of fsspec. Its methods raise TimeoutError besides what the library raises."""

    def __init__(self, file_system: Any) -> None:
        self._file_system = file_system

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._ask, name, ANSWER_SECONDS)

    def get_file(self, place: str, path: str, size: int) -> None:
        """Copy a file of the store, of so many bytes, to a local path."""
        self._ask("get_file", ANSWER_SECONDS + size / LEAST_BYTES_PER_SECOND, place, path)

    def put_file(self, path: str, place: str) -> None:
        """Copy a local file into the store."""
        size = Path(path).stat().st_size
        self._ask("put_file", ANSWER_SECONDS + size / LEAST_BYTES_PER_SECOND, path, place)

    def _ask(self, name: str, seconds: float, *arguments: Any, **settings: Any) -> Any:
        """Call a method of the file system. Raise TimeoutError after so many seconds."""
        from fsspec.asyn import FSTimeoutError, sync

        # The coroutine `_get_file`, since it can be cancelled; the method `get_file` cannot.
        method = getattr(self._file_system, f"_{name}")
        loop = self._file_system.loop
        try:
            return sync(loop, method, *arguments, timeout=seconds, **settings)
        except FSTimeoutError as error:
            message = f"no whole answer about {arguments[0]} in {seconds:,.0f} s"
            raise TimeoutError(message) from error
