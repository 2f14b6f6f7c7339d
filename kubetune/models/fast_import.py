"""Imports large libraries without what training never uses of them, so that a rank comes to its first step sooner.

Importing torch, transformers and PEFT is most of a start, and half of that serves nothing: the garbage collector looks
for garbage that there is none of, packages are imported only because they happen to be installed, and torch's compiler
only to mark functions for it. Light: nothing here imports anything large by itself.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

DYNAMO = "torch._dynamo"


@contextmanager
def sparingly(*, compiles_layers: bool = False) -> Iterator[None]:
    """Import torch and transformers without anything of theirs that neither training nor answering uses."""
    with in_haste(), without("scipy", "sklearn"), compiler_asleep(unless=compiles_layers):
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


@contextmanager
def compiler_asleep(*, unless: bool = False) -> Iterator[None]:
    """Context in which modules that only mark functions for torch.compile do not import the compiler for it.

    In transformers these are functions of paged attention and of 8-bit experts; parts of torch do so when first used.
    Worth 0.6 s of the 5.8 s of CPU time in which `kubetune train` makes one step of the embedded model, best of five.
    Their marks are lost: `unless` is for a process that compiles whole layers of a model.
    """
    import torch

    if unless or DYNAMO in sys.modules or (spec := PathFinder.find_spec(DYNAMO, torch.__path__)) is None:
        yield
        return
    stand_in = _Sleeper(spec)
    sys.modules[DYNAMO] = torch._dynamo = stand_in
    try:
        yield
    finally:
        stand_in.leave()


def _unchanged(function: Any) -> Any:
    return function


class _Sleeper(ModuleType):
    """torch._dynamo as long as nobody wants more of it than marks and its submodules; then it gives way to it."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        self.__spec__, self.__file__, self.__path__ = spec, spec.origin, spec.submodule_search_locations or []

    @staticmethod
    def disable(function: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Callee of `torch.compiler.disable`, which decorates both with and without arguments."""
        return _unchanged if function is None else function

    allow_in_graph = assume_constant_result = staticmethod(_unchanged)

    def __getattr__(self, name: str) -> Any:
        self.leave()
        return getattr(importlib.import_module(DYNAMO), name)

    def leave(self) -> None:
        """Give way: the next import finds the real one."""
        import torch

        if sys.modules.get(DYNAMO) is self:
            del sys.modules[DYNAMO], torch._dynamo
