"""Speeds of this user's earlier runs, and what they let one expect of the next run: a range of tokens/s.

A small file in the user's cache has a line for each run: sizes of the model, method, precision, rows, device, speed.
Nothing depends on it: damage costs the damaged lines, and a cache that cannot be written costs the next forecast.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from kubetune.base import files, jsonl, locks, logs
from kubetune.base.cpu import processor
from kubetune.base.humanize import counted
from kubetune.errors import KubetuneError

FILE = "speeds.jsonl"
# The newest runs are kept.
MOST_RUNS = 500
# Runs that are shorter than this share of the longest one do not count: they are mostly their beginning.
SHORTEST_SHARE = 0.1
# Runs of the same shape: the mean lengths of their rows, and the tokens of micro-batches, differ at most by this factor.
ALIKE = math.sqrt(2)
# Runs of similar shape: their FLOPs for a token differ at most by this factor.
SIMILAR = 8.0
# Factors that widen the range of earlier runs on both sides.
SPARE_IF_SAME = 1.1
SPARE_IF_SIMILAR = 1.5


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]


@dataclass(frozen=True)
class RunShape:
    """Everything that the speed of a run depends on."""

    parameters: int
    hidden: int
    layers: int
    method: str
    dtype: str | None  # None if only the run itself will know it
    device: str  # name of the GPU, or of the CPU with its cores
    devices: Positive  # GPUs, or nodes if the processes of a node share its CPU
    world: int  # processes
    length: Positive  # mean tokens of a row
    batch: Positive  # tokens of a micro-batch
    flops: Positive  # of one token

    def is_same(self, other: RunShape) -> bool:
        """True if runs of both kinds do the same, with rows of about the same length."""
        if not self._is_comparable(other):
            return False
        for name in ("parameters", "hidden", "layers", "devices", "world"):
            if getattr(self, name) != getattr(other, name):
                return False
        # FLOPs tell teachers of other sizes apart.
        for name in ("length", "batch", "flops"):
            if _ratio(getattr(self, name), getattr(other, name)) > ALIKE:
                return False
        return True

    def is_similar(self, other: RunShape) -> bool:
        """True if the speed of one can be estimated from the other's by FLOPs."""
        return self._is_comparable(other) and _ratio(self.flops, other.flops) <= SIMILAR

    def _is_comparable(self, other: RunShape) -> bool:
        dtypes = {self.dtype, other.dtype} - {None}
        return self.device == other.device and self.method == other.method and len(dtypes) <= 1


@dataclass(frozen=True)
class Speed:
    """The speed of a run that has ended."""

    kind: RunShape
    tokens_per_second: Positive  # of all devices together
    seconds: Positive  # within steps
    time: str  # at which it ended
    # Share of these in which steps waited for drawn answers; None for runs that draw none.
    waiting_share: Annotated[float, Field(ge=0, le=1)] | None = None


_SPEED = TypeAdapter(Speed)


@dataclass(frozen=True)
class Range:
    """Tokens/s that earlier runs let one expect."""

    low: float
    middle: float  # the median
    high: float
    source: str  # which runs, in words


def range_of(kind: RunShape, known: Iterable[Speed]) -> Range | None:
    """Return the speeds of earlier runs of the same shape, else of similar ones; None without runs on this device."""
    same = []
    similar = []
    for run in known:
        if kind.is_same(run.kind):
            same.append(run)
        elif kind.is_similar(run.kind):
            similar.append(run)
    if same:
        rates = sorted(run.tokens_per_second for run in _long_enough(same))
        return _range(rates, SPARE_IF_SAME, "this shape")
    if similar:
        rates = sorted(_scaled(run, kind) for run in _long_enough(similar))
        return _range(rates, SPARE_IF_SIMILAR, "similar shape, scaled by FLOPs,")
    return None


def waiting_share(kind: RunShape, known: Iterable[Speed]) -> float | None:
    """Return the median share of their seconds that runs of the same shape waited for drawn answers; None without."""
    shares = []
    for run in known:
        if run.waiting_share is not None and kind.is_same(run.kind):
            shares.append(run.waiting_share)
    return statistics.median(shares) if shares else None


def _long_enough(runs: list[Speed]) -> list[Speed]:
    least = SHORTEST_SHARE * max(run.seconds for run in runs)
    return [run for run in runs if run.seconds >= least]


def _range(rates: list[float], spare: float, shape: str) -> Range:
    source = f"{counted(len(rates), 'earlier run')} of {shape} on this machine"
    return Range(rates[0] / spare, rates[len(rates) // 2], rates[-1] * spare, source)


def _scaled(run: Speed, kind: RunShape) -> float:
    """Return the rate of a similar run for this number of devices and FLOPs of a token."""
    return run.tokens_per_second / run.kind.devices * kind.devices * run.kind.flops / kind.flops


def _ratio(a: float, b: float) -> float:
    return max(a, b) / min(a, b)


def device_name(gpu: str | None) -> str:
    """Return the name of what computes here: the GPU, or the CPU and how many cores this process may use."""
    if gpu:
        return gpu
    return f"{processor.model_name()}, {counted(len(os.sched_getaffinity(0)), 'core')}"


def place() -> Path:
    """Return the file in the user's cache."""
    return files.user_cache(os.environ) / "kubetune" / FILE


def read() -> list[Speed]:
    """Return the runs in the cache, the newest last."""
    try:
        lines = list(jsonl.read(place(), damaged=[]))
    except OSError:
        return []
    speeds = []
    for line in lines[-MOST_RUNS:]:
        speed = _parsed(line)
        if speed is not None:
            speeds.append(speed)
    return speeds


def keep(speed: Speed) -> None:
    """Add a run to the cache. An error is logged and not raised."""
    path = place()
    try:
        with locks.lock(path.with_name(f".{FILE}.lock"), wait=False):
            # The whole file is written again, so that it stays short and free of damage.
            kept = [*read()[-MOST_RUNS + 1 :], speed]
            files.write_atomic(path, "".join(json.dumps(asdict(run)) + "\n" for run in kept))
    except (KubetuneError, OSError) as error:
        logs.RESULT.info("the speed of this run is not kept for later forecasts: %s", error)


def _parsed(line: Mapping[str, Any]) -> Speed | None:
    """Return the speed in a line. None if it holds none that a forecast can use."""
    try:
        return _SPEED.validate_python(line)
    except ValidationError:
        return None
