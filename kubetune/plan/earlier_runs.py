"""Speeds of this user's earlier runs, and what they say of the next: a range of tokens/s, and whose it is.

One small file in the user's cache holds a line for each run: sizes of the model, method, precision, rows, device,
speed. It is never needed: damage costs the lines it hits, and a cache that cannot be written costs the next forecast.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from kubetune.base import cpu, files, jsonl, logs
from kubetune.base.humanize import counted
from kubetune.errors import KubetuneError

FILE = "speeds.jsonl"
MOST_RUNS = 500
"""Kept at most; the oldest go first."""
SHORTEST_SHARE = 0.1
"""Of the longest run found: shorter ones say more of their beginning than of their speed."""
ALIKE = math.sqrt(2)
"""By how much the mean length of rows, or the tokens of a micro-batch, may differ between runs of one shape."""
SIMILAR = 8.0
"""By how much FLOPs for a token may differ between runs that say something of each other."""
SPARE = {True: 1.1, False: 1.5}
"""Factors that widen the range of earlier runs on both sides: of the same shape, and of a similar one."""


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]


@dataclass(frozen=True)
class Kind:
    """All that the speed of a run depends on. `devices` are GPUs, or nodes where the CPUs of one share the work.

    `dtype` is None where only the run itself will know it.
    """

    parameters: int
    hidden: int
    layers: int
    method: str
    dtype: str | None
    device: str
    devices: Positive
    world: int
    length: Positive
    batch: Positive
    flops: Positive

    def is_same(self, other: Kind) -> bool:
        """Runs of both kinds do the same, row by row of about the same length."""
        exact = ("parameters", "hidden", "layers", "devices", "world")
        return (
            self._is_comparable(other)
            and all(getattr(self, name) == getattr(other, name) for name in exact)
            and _ratio(self.length, other.length) <= ALIKE
            and _ratio(self.batch, other.batch) <= ALIKE
        )

    def is_similar(self, other: Kind) -> bool:
        """The speed of one, by its FLOPs, says something of the other's."""
        return self._is_comparable(other) and _ratio(self.flops, other.flops) <= SIMILAR

    def _is_comparable(self, other: Kind) -> bool:
        dtypes = {self.dtype, other.dtype} - {None}
        return (self.device, self.method) == (other.device, other.method) and len(dtypes) <= 1


@dataclass(frozen=True)
class Speed:
    """A run that ended: its kind, tokens/s of all its devices, the seconds of its steps, and when that was."""

    kind: Kind
    tokens_per_second: Positive
    seconds: Positive
    time: str


_SPEED = TypeAdapter(Speed)


@dataclass(frozen=True)
class Range:
    """Tokens/s that earlier runs let one expect, from `low` to `high`, with the middle one, and whose word it is."""

    low: float
    middle: float
    high: float
    source: str


def ranges(kind: Kind, known: Iterable[Speed]) -> list[Range]:
    """Ranges by earlier runs of the same shape, then by similar ones; [] where there were none on this device."""
    ranges_of_speed, known = [], list(known)
    same = [speed for speed in known if kind.is_same(speed.kind)]
    similar = [speed for speed in known if kind.is_similar(speed.kind) and speed not in same]
    for runs, is_same in ((same, True), (similar, False)):
        if not runs:
            continue
        enough = SHORTEST_SHARE * max(run.seconds for run in runs)
        rates = sorted(_scaled(run, kind, is_same) for run in runs if run.seconds >= enough)
        shape = "this shape" if is_same else "similar shape, scaled by FLOPs,"
        source = f"{counted(len(rates), 'earlier run')} of {shape} on this machine"
        low, high = rates[0] / SPARE[is_same], rates[-1] * SPARE[is_same]
        ranges_of_speed.append(Range(low, rates[len(rates) // 2], high, source))
    return ranges_of_speed


def _scaled(run: Speed, kind: Kind, is_same: bool) -> float:
    if is_same:
        return run.tokens_per_second
    return run.tokens_per_second / run.kind.devices * kind.devices * run.kind.flops / kind.flops


def _ratio(a: float, b: float) -> float:
    return max(a, b) / min(a, b)


def device_name(gpu: str | None) -> str:
    """Name of what computes here: the GPU of this name, or the CPU and how many of its cores this process may use."""
    return gpu or f"{cpu.model_name()}, {counted(len(os.sched_getaffinity(0)), 'core')}"


def place() -> Path:
    """The file, in the user's cache."""
    return files.user_cache(os.environ) / "kubetune" / FILE


def read(before: str | None = None) -> list[Speed]:
    """The runs that the cache knows of, the newest last; `before`: only those that had ended by then."""
    try:
        lines = list(jsonl.read(place(), damaged=[]))
    except OSError:
        return []
    speeds = (_parsed(line) for line in lines[-MOST_RUNS:])
    return [
        speed for speed in speeds if speed is not None and (before is None or speed.time <= before)
    ]


def keep(speed: Speed) -> None:
    """Add a run to the cache. Never ends the run that calls it."""
    path = place()
    try:
        with files.lock(path.with_name(f".{FILE}.lock"), wait=False):
            kept = [*read()[-MOST_RUNS + 1 :], speed]
            files.write_atomic(path, "".join(json.dumps(asdict(run)) + "\n" for run in kept))
    except (KubetuneError, OSError) as error:
        logs.RESULT.info("the speed of this run is not kept for later forecasts: %s", error)


def _parsed(line: Mapping[str, Any]) -> Speed | None:
    """A line as a speed; None for one that says nothing that a forecast could use."""
    try:
        return _SPEED.validate_python(line)
    except ValidationError:
        return None
