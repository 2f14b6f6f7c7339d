"""Measurements that ranks take together: all-reduce, the links between neighbours, each rank's own speed, and volumes.

All ranks call each function; all but `measure_volume` return the same on each. Not for judging (rank.py).
"""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from kubetune.base import files
from kubetune.distributed import process_group
from kubetune.distributed.process_group import World, wait_for_device

MIB = 1 << 20
_SMALLEST_BYTES = 4096
_LINK_BYTES = 4 * MIB
_REPEATS = 7
_PRODUCTS = 128
# Whole numbers below this stay whole in fp32 when 16,000 ranks add them.
_PATTERN = 1021


@dataclass(frozen=True)
class Reduction:
    """All-reduces of one size. `bus_gb_per_second`: bytes that really cross each link, as nccl-tests reckon it."""

    bytes: int
    seconds: float
    gb_per_second: float
    bus_gb_per_second: float
    wrong_ranks: tuple[int, ...]


@dataclass(frozen=True)
class Link:
    """Messages between two ranks, one way."""

    ranks: tuple[int, int]
    seconds: float
    gb_per_second: float


@dataclass(frozen=True)
class Volume:
    """A folder as one node sees it. `problem` is None when a file could be written and read back."""

    rank: int
    path: str
    free_bytes: int
    write_mib_per_second: float | None
    problem: str | None


def measure_all_reduce(world: World, largest_bytes: int) -> list[Reduction]:
    """Right sums and their speed, from 4 KiB by factors of 16 up to `largest_bytes`; nothing for a lone rank."""
    if world.size == 1:
        return []
    sizes = [_SMALLEST_BYTES * 16**n for n in range(8) if _SMALLEST_BYTES * 16**n < largest_bytes]
    return [_all_reduce(world, size) for size in [*sizes, largest_bytes]]


def _all_reduce(world: World, size: int) -> Reduction:
    count = size // 4
    pattern = (torch.arange(count, device=world.device) % _PATTERN).float()
    total = process_group.sum_(pattern + world.rank, world)
    expected = pattern * world.size + world.size * (world.size - 1) // 2
    right = process_group.gather(torch.equal(total, expected), world)

    numbers = torch.zeros(count, device=world.device)
    seconds = max(
        process_group.gather(
            _median_seconds(lambda: process_group.sum_(numbers, world), world), world
        )
    )
    speed = size / seconds / 1e9
    return Reduction(
        bytes=size,
        seconds=seconds,
        gb_per_second=speed,
        bus_gb_per_second=speed * 2 * (world.size - 1) / world.size,
        wrong_ranks=tuple(rank for rank, is_right in enumerate(right) if not is_right),
    )


def measure_links(world: World) -> list[Link]:
    """The speed from each rank to the next, one pair at a time while the others are silent."""
    if world.size == 1:
        return []
    pairs = (
        [(0, 1)]
        if world.size == 2
        else [(rank, (rank + 1) % world.size) for rank in range(world.size)]
    )
    told = process_group.gather([_link_seconds(pair, world) for pair in pairs], world)
    slowest = [max(seconds) for seconds in zip(*told, strict=True)]
    return [
        Link(pair, seconds, _LINK_BYTES / seconds / 1e9)
        for pair, seconds in zip(pairs, slowest, strict=True)
    ]


def _link_seconds(pair: tuple[int, int], world: World) -> float:
    """Seconds for a message from one of the pair to the other; 0 on ranks that are neither."""
    process_group.barrier(world)
    if world.rank not in pair:
        return 0.0
    message, is_first = torch.zeros(_LINK_BYTES // 4, device=world.device), world.rank == pair[0]
    there_and_back = _median_seconds(lambda: _ping(message, pair[is_first], is_first), world)
    return there_and_back / 2


def _ping(message: Tensor, other: int, is_first: bool) -> None:
    with process_group.peers():
        for sends in (is_first, not is_first):
            if sends:
                dist.send(message, other)
            else:
                dist.recv(message, other)


def measure_compute(world: World) -> list[float]:
    """Seconds that each rank needs for the same work without the others, all at once; by rank."""
    on_gpu = world.device.type == "cuda"
    matrix = torch.ones(4096 if on_gpu else 256, 4096 if on_gpu else 256, device=world.device)
    matrix @ matrix  # the first time sets things up
    process_group.barrier(world)
    wait_for_device(world.device)
    began = time.perf_counter()
    # Not the typical time of short pieces: a rank with too little CPU does most of them fast and then stands still.
    for _ in range(_PRODUCTS):
        matrix @ matrix
    wait_for_device(world.device)
    return process_group.gather(time.perf_counter() - began, world)


def measure_volume(path: Path, rank: int, mib: int) -> Volume:
    """Write a file of `mib` MiB to the folder durably, read it back, and remove it."""
    if not path.is_dir():
        return Volume(rank, str(path), 0, None, "is no folder")
    free = files.free_bytes(path)
    if free < mib * MIB:
        return Volume(
            rank,
            str(path),
            free,
            None,
            f"has {free / MIB:.0f} MiB free, {mib} MiB were to be written",
        )
    target = files.temporary_sibling(path / "kubetune-smoke")
    try:
        seconds = _write_and_read(target, mib)
    except OSError as error:
        return Volume(rank, str(path), free, None, error.strerror or str(error))
    finally:
        target.unlink(missing_ok=True)
    if seconds is None:
        return Volume(rank, str(path), free, None, "gave back other bytes than were written")
    return Volume(rank, str(path), free, mib / seconds, None)


def _write_and_read(path: Path, mib: int) -> float | None:
    """Seconds until everything was durable; None when what is read differs."""
    # Chance, so that a file system that compresses gains nothing.
    block, written = os.urandom(MIB), hashlib.sha256()
    began = time.perf_counter()
    with open(path, "xb") as file:
        for _ in range(mib):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    for _ in range(mib):
        written.update(block)
    return seconds if files.sha256_file(path) == written.hexdigest() else None


def outliers(seconds: Sequence[float], factor: float) -> dict[int, float]:
    """Index → how many times the median of all others, of those that take more than `factor` times as long."""
    if len(seconds) < 2:
        return {}
    ratios = [
        value / statistics.median([*seconds[:index], *seconds[index + 1 :]])
        for index, value in enumerate(seconds)
    ]
    return {index: ratio for index, ratio in enumerate(ratios) if ratio > factor}


def _median_seconds(work: Callable[[], object], world: World) -> float:
    """Typical seconds of `work`; the first time, which sets things up, does not count."""
    found = []
    for _ in range(_REPEATS + 1):
        wait_for_device(world.device)
        began = time.perf_counter()
        work()
        wait_for_device(world.device)
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])
