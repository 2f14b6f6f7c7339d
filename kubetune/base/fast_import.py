"""Imports large libraries without what training never uses of them, so that a rank comes to its first step sooner.

Importing torch, transformers and PEFT is most of a start, and much of that serves nothing: the garbage collector looks
for garbage that there is none of, and packages are imported only because they happen to be installed. Light: nothing
here imports anything large by itself.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path


@contextmanager
def sparingly() -> Iterator[None]:
    """Import torch and transformers without anything of theirs that neither training nor answering uses."""
    with in_haste(), without("scipy", "sklearn", "boto3"):
        yield


@contextmanager
def in_haste() -> Iterator[None]:
    """Import with the garbage collector off: what modules are made of stays, and looking through it takes a second.

    Afterwards no collection looks at it again, in this process or one forked from it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def torch_opened() -> Iterator[None]:
    """Open torch's libraries in a thread, while something else is imported: the interpreter does not wait for that.

    With CUDA they are left to torch, which looks for NVIDIA's libraries first.
    """
    found = find_spec("torch") if "torch" not in sys.modules else None
    folder = Path(found.origin).parent / "lib" if found is not None and found.origin else Path()
    library = folder / "libtorch_python.so"
    thread = threading.Thread(target=_open, args=(library,), name="torch's libraries")
    if is_there := library.is_file() and not (folder / "libtorch_cuda.so").exists():
        thread.start()
    yield
    if is_there:
        thread.join()


def _open(library: Path) -> None:
    with suppress(OSError):  # which torch will tell of in its own words
        ctypes.CDLL(str(library.with_name("libtorch_global_deps.so")), ctypes.RTLD_GLOBAL)  # first, as torch does
        ctypes.CDLL(str(library))


@contextmanager
def without(*packages: str) -> Iterator[None]:
    """Context in which packages that nobody has imported yet look as if they were not installed."""
    hidden = [name for name in packages if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # the import system's own way to say that there is none
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
