"""Measures of the user's own: functions of a Python file that the run file names, called for every answer.

Code is taken from that one file and from nowhere else, but for functions that a caller in Python has at hand. If it
raises, or returns no number, the evaluation ends with the row and the user's own traceback.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from kubetune import errors
from kubetune.config.schema.evaluation import OwnMetricsConfig

# `function(prompt, answer, reference, record)`.
Function = Callable[[str, str, str, dict[str, Any]], float]

_ARGUMENTS = ("prompt", "answer", "reference", "record")


def named(functions: Sequence[Callable[..., Any]]) -> dict[str, Function]:
    """Return functions of this process by their names. Raise ConfigError for what is no function or has no name."""
    problems = []
    by_name: dict[str, Function] = {}
    for function in functions:
        # A lambda has a name that no metric can have.
        name = getattr(function, "__name__", "")
        if not callable(function) or not name.isidentifier():
            problems.append(
                f"metrics: found {name or function!r}; expected a function that has a name"
            )
            continue
        problem = _misfit("metrics", name, function)
        if problem:
            problems.append(problem)

        # For messages: the file that the function was written in.
        code = getattr(function, "__code__", None)
        path = Path(code.co_filename) if code else Path("metrics")
        by_name[name] = _guarded(function, path, name)

    if problems:
        raise errors.ConfigError(problems)
    return by_name


def require_file(wanted: OwnMetricsConfig) -> Path:
    """Return the file with the functions. Raise ConfigError unless it is a file."""
    path = Path(wanted.file).expanduser()
    if not path.is_file():
        raise errors.ConfigError(
            f"evaluation.metrics.file: {path} is no file. Nothing was written."
        )
    return path


def load(wanted: OwnMetricsConfig) -> dict[str, Function]:
    """Return the functions by name. Raise ConfigError if the file or a function is missing or cannot be run."""
    path = require_file(wanted)
    module = _run(path)
    problems = []
    by_name: dict[str, Function] = {}
    for name in wanted.functions:
        function = getattr(module, name, None)
        if not callable(function):
            defined = ", ".join(_functions_of(module)) or "none"
            problems.append(f"{path} has no function {name}; it has {defined}")
            continue
        problem = _misfit(path, name, function)
        if problem:
            problems.append(problem)
        by_name[name] = _guarded(function, path, name)

    if problems:
        raise errors.ConfigError(problems)
    return by_name


def _functions_of(module: ModuleType) -> list[str]:
    """Return the names of the functions that a module defines, without those that it imports."""
    names = []
    for value in vars(module).values():
        if inspect.isfunction(value) and value.__module__ == module.__name__:
            names.append(value.__name__)
    return names


def _run(path: Path) -> ModuleType:
    """Return the file as a module, which may import files next to it."""
    # A name that no module has, so that the file replaces none.
    spec = importlib.util.spec_from_file_location(f"kubetune metrics {path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up the module that defines them.
    sys.modules[module.__name__] = module
    try:
        with _beside(path):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise errors.ConfigError(f"{path} cannot be run:\n{_trace(error, path)}") from error

    return module


@contextmanager
def _beside(path: Path) -> Iterator[None]:
    """Let imports find files next to this one, also imports within its functions."""
    folder = str(path.parent.absolute())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        # The user's code may have changed it.
        if folder in sys.path:
            sys.path.remove(folder)


def _misfit(
    place: Path | str,
    name: str,
    function: Callable[..., Any],
) -> str:
    """Return what is wrong with a function that cannot be called with the four arguments; empty if it can."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        # Built-in functions have no signature; a call will show.
        return ""
    return misfit(place, name, signature)


def misfit(place: Path | str, name: str, signature: inspect.Signature) -> str:
    """Return what is wrong with the parameters of a function, empty if it can be called with the four arguments."""
    try:
        # By position, as it will be called.
        signature.bind(*_ARGUMENTS)
    except TypeError as error:
        return f"{place}: {name}: {error}; expected {name}({', '.join(_ARGUMENTS)}) -> float"
    return ""


def _guarded(
    function: Callable[..., Any],
    path: Path,
    name: str,
) -> Function:
    """Return the function so that what it raises, or returns that is no number, becomes a ConfigError."""

    def call(
        prompt: str,
        answer: str,
        reference: str,
        record: dict[str, Any],
    ) -> float:
        try:
            with _beside(path):
                value = function(prompt, answer, reference, record)
        except (Exception, SystemExit) as error:
            raise errors.ConfigError(
                f"{path}: {name} raised {type(error).__name__} for the answer {answer[:200]!r}:\n{_trace(error, path)}"
            ) from error

        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan

        if not math.isfinite(number):
            raise errors.ConfigError(
                f"{path}: {name} returned {value!r} for the answer {answer[:200]!r}; expected a finite number"
            )

        return number

    return call


def _trace(error: BaseException, path: Path) -> str:
    """Return the traceback from the user's file on, without what led there."""
    frames = traceback.extract_tb(error.__traceback__)
    # Frames of kubetune come before it; a mistake in its syntax has no frame of the file at all.
    while frames and Path(frames[0].filename) != path:
        del frames[0]
    lines = [*traceback.format_list(frames), *traceback.format_exception_only(error)]
    return "".join(lines).rstrip()
