"""Results of `kubetune bench`: the fastest settings on a machine, for those that are `auto`.

A small file in the user's cache, next to the speeds of earlier runs, has an entry for each device. Nothing depends on it:
if it is missing, damaged, or was written with another torch, runs decide without it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from kubetune.base import files, locks, logs
from kubetune.config.schema import TrainingConfig
from kubetune.errors import KubetuneError
from kubetune.plan import earlier_runs
from kubetune.plan.activations import is_worth_compiling
from kubetune.rundir.metrics import now

FILE = "choices.json"


@dataclass(frozen=True)
class Choices:
    """The fastest value of each setting on a device. None if it was not measured."""

    compile: Literal["layers"] | bool | None = None
    # FLOPs of a run from which `compile` saves more time than it takes.
    compile_from: float | None = None
    fp8: bool | None = None
    attention: Literal["padding_free", "sdpa"] | None = None
    why: str = ""  # what was measured, in words
    time: str = ""  # when
    torch: str = ""  # with which version


_ALL = TypeAdapter(dict[str, Any])
_ONE = TypeAdapter(Choices)


def place() -> Path:
    """Return the file in the user's cache."""
    return earlier_runs.place().with_name(FILE)


def read(gpu: str | None) -> Choices:
    """Return the choices for the GPU of this name, or for this machine's CPU. All None if nothing is known."""
    try:
        # Measured with another version of torch, a choice may be wrong.
        choices = _ONE.validate_python(_entries().get(earlier_runs.device_name(gpu), {}))
    except ValidationError:
        return Choices()
    return choices if choices.torch == _torch() else Choices()


def keep(gpu: str | None, **measured: Any) -> Choices:
    """Add what was measured to what is known of a device. An error is logged and not raised."""
    path = place()
    choices = replace(read(gpu), **measured, time=now(), torch=_torch())
    try:
        with locks.lock(path.with_name(f".{FILE}.lock"), wait=False):
            entries = {**_entries(), earlier_runs.device_name(gpu): asdict(choices)}
            files.write_atomic(path, json.dumps(entries, indent=2) + "\n")
    except (KubetuneError, OSError) as error:
        logs.RESULT.info("what was measured on this machine is not kept for later runs: %s", error)
    return choices


def compiles(
    task: str,
    training: TrainingConfig,
    known: Choices,
    parameters: int,
    tokens: float,
    device: str,
) -> bool | str:
    """Return what `training.compile: auto` means if that was measured here, else `auto`. `tokens`: of all steps."""
    # Only language models that are whole on each device were measured.
    if task != "causal_lm" or training.parallelism == "fsdp" or known.compile is None:
        return "auto"
    if not is_worth_compiling(parameters, tokens, device, known.compile_from):
        return False
    return known.compile


def _entries() -> dict[str, Any]:
    try:
        return _ALL.validate_json(place().read_bytes())
    except (OSError, ValidationError):
        return {}


def _torch() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
