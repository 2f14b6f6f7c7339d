"""Choices that were measured on a machine, for settings that are `auto`: by `kubetune bench`, or where a run began.

One small file in the user's cache, beside the speeds of earlier runs, with an entry for each device. It is never
needed: where it lacks, or is damaged, or was written with another torch, runs decide as they would without it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from datetime import date, timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from kubetune.base import files, logs
from kubetune.config.schema import TrainingConfig
from kubetune.errors import ConfigError, KubetuneError
from kubetune.plan import earlier_runs
from kubetune.plan.activations import is_worth_compiling
from kubetune.rundir.metrics import now

FILE = "choices.json"
PINNED = "KUBETUNE_CPU_DTYPE"
"""The environment variable that decides instead of a measurement."""
DTYPES = ("float32", "bfloat16")
DAYS = 30
"""Age at which the dtype of a CPU is measured again: what was wrong once, or of another machine, does not stay."""
NARROW = 512
"""Hidden size below which other things than products take the time on a CPU, and those are slower in bf16."""


@dataclass(frozen=True)
class Choices:
    """The faster of each pair on a device; None where that was not measured. `why`: what was measured, in words."""

    dtype: Literal["bfloat16", "float32"] | None = None
    dtype_time: str = ""
    compile: Literal["layers"] | bool | None = None
    compile_from: float | None = None
    """Floating-point operations of a run from which `compile` saves more seconds here than it takes."""
    fp8: bool | None = None
    attention: Literal["padding_free", "sdpa"] | None = None
    why: str = ""
    time: str = ""
    torch: str = ""


_ALL = TypeAdapter(dict[str, Any])
_ONE = TypeAdapter(Choices)


def place() -> Path:
    """The file, in the user's cache."""
    return earlier_runs.place().with_name(FILE)


def read(gpu: str | None) -> Choices:
    """The choices for the GPU of this name, or for this machine's CPU; with None for all where nothing is known."""
    try:
        choices = _ONE.validate_python(_entries().get(earlier_runs.device_name(gpu), {}))
    except ValidationError:
        return Choices()
    return choices if choices.torch == _torch() else Choices()


def keep(gpu: str | None, **measured: Any) -> Choices:
    """Add what was measured to what is known of a device. Never ends the run that calls it."""
    path = place()
    choices = replace(read(gpu), **measured, time=now(), torch=_torch())
    if "dtype" in measured:
        choices = replace(choices, dtype_time=choices.time)
    try:
        with files.lock(path.with_name(f".{FILE}.lock"), wait=False):
            entries = {**_entries(), earlier_runs.device_name(gpu): asdict(choices)}
            files.write_atomic(path, json.dumps(entries, indent=2) + "\n")
    except (KubetuneError, OSError) as error:
        logs.RESULT.info("what was measured on this machine is not kept for later runs: %s", error)
    return choices


def cpu_dtype(width: int | None) -> tuple[str, str] | None:
    """The meaning of `model.dtype: auto` on this machine's CPU, and why; None where it is yet to be measured.

    Raises ConfigError where the environment asks for another dtype than the two.
    """
    if pinned := os.environ.get(PINNED):
        if pinned not in DTYPES:
            raise ConfigError(f"{PINNED} is {pinned!r}; expected {' or '.join(DTYPES)}, or nothing")
        return pinned, f"{PINNED} says so"
    if width is not None and width < NARROW:
        return "float32", f"the model is narrow: its hidden size is {width}"
    known = read(None)
    day = known.dtype_time[:10]
    if known.dtype is None or day < str(date.today() - timedelta(days=DAYS)):
        return None
    return known.dtype, f"{known.why} (measured on {day})"


def compiles(
    task: str,
    training: TrainingConfig,
    known: Choices,
    parameters: int,
    tokens: float,
    device: str,
) -> bool | str:
    """Return what `training.compile: auto` means if that was measured here, else `auto`.

    Measured were language models, whole on each device. `tokens`: of all steps.
    """
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
