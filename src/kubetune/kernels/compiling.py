"""Leave torch's compiler when the run is to stop: it may take longer than the grace time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class CompilingStopped(Exception):
    """The process was asked to stop, and has left torch's compiler, which may take longer than the grace time."""


_compiles = False


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Raise CompilingStopped for a request to stop while the block runs. The caller then goes on without the compiler."""
    global _compiles
    _compiles = True
    try:
        yield
    finally:
        _compiles = False


def leave_compiler() -> None:
    """Raise CompilingStopped if the main thread is in a block of `compiling`. For handlers of signals."""
    global _compiles
    if _compiles:
        _compiles = False  # the exception may keep the block from doing it
        raise CompilingStopped("the run is to stop")
