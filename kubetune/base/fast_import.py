"""Imports large libraries without what training never uses of them, so that a rank comes to its first step sooner.

Importing torch, transformers and PEFT is most of a start, and much of that serves nothing: the garbage collector looks
for garbage that there is none of, and packages are imported only because they happen to be installed. Light: nothing
here imports anything large by itself.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any


@contextmanager
def sparingly() -> Iterator[None]:
    """Import torch and transformers without anything of theirs that neither training nor answering uses."""
    with in_haste(), without("scipy", "sklearn", "boto3"):
        yield


@contextmanager
def in_haste() -> Iterator[None]:
    """Import with the garbage collector off: what modules are made of stays, and looking through it takes a second.

    Afterwards no collection looks at it again, in this process or one forked from it. Within, modules are told by their
    names: torch asks which it is in for each of its operators, and `inspect` goes through the files of all for that.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    inspect.getmodule = _module_of  # type: ignore[assignment]
    try:
        yield
    finally:
        inspect.getmodule = _searched
        gc.freeze()
        if was_enabled:
            gc.enable()


_searched = inspect.getmodule


def _module_of(thing: Any, filename: str | None = None) -> ModuleType | None:
    named = sys.modules.get(thing.f_globals.get("__name__", "")) if inspect.isframe(thing) else None
    return named or _searched(thing, filename)


def open_torch() -> None:
    """Open torch's largest library in a thread, while sympy is imported, which torch takes along.

    It is all Python: what has a library of its own waits for the one being opened. With CUDA they are left to torch,
    which looks for NVIDIA's first.
    """
    found = find_spec("torch") if "torch" not in sys.modules and sys.platform == "linux" else None
    library = Path(found.origin).parent / "lib" / "libtorch_cpu.so" if found is not None and found.origin else Path()
    if library.is_file() and not library.with_name("libtorch_cuda.so").exists():
        thread = threading.Thread(target=_open, args=(library,), name="torch's libraries")
        thread.start()
        with suppress(ImportError):
            import_module("sympy")
        thread.join()


def _open(library: Path) -> None:
    # By its own name: ctypes.CDLL would keep the interpreter from going on. A failure is torch's to tell.
    with suppress(AttributeError):
        dlopen = ctypes.CDLL(None).dlopen
        dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
        for name, scope in (("libtorch_global_deps.so", os.RTLD_GLOBAL), (library.name, 0)):  # as torch does
            dlopen(bytes(library.with_name(name)), os.RTLD_NOW | scope)


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
