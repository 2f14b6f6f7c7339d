"""Measurements that ranks take together: all-reduce, the links between neighbours, each rank's own speed, and volumes.

All ranks call each function; all but `measure_volume` return the same on each. Not for judging (report.py).
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
# All-reduces, by factors of 16. Ranks on CPUs only show that they add up.
_SMALLEST_BYTES = 4096
_LARGEST_BYTES = {"cuda": 64 * MIB, "cpu": MIB}
# Written to each volume, and read.
VOLUME_MIB = 64
_LINK_BYTES = 4 * MIB
_REPEATS = 7
# Products of matrices that each rank computes.
_PRODUCTS = 128
# Whole numbers below this stay whole in fp32 when 16,000 ranks add them.
_PATTERN = 1021


@dataclass(frozen=True)
class Reduction:
    """All-reduces of one size."""

    bytes: int
    seconds: float
    gb_per_second: float
    bus_gb_per_second: float  # bytes that really cross each link, as nccl-tests count them
    wrong_ranks: tuple[int, ...]


@dataclass(frozen=True)
class Link:
    """Messages between two ranks, one way."""

    ranks: tuple[int, int]
    seconds: float
    gb_per_second: float


@dataclass(frozen=True)
class Volume:
    """A folder as one node sees it."""

    rank: int
    path: str
    free_bytes: int
    write_mib_per_second: float | None
    problem: str | None  # None when a file could be written and read back


def measure_all_reduce(world: World) -> list[Reduction]:
    """Measure sums and their speed, from small to large; nothing for a lone rank."""
    if world.size == 1:
        return []
    reductions = []
    size = _SMALLEST_BYTES
    while size <= _LARGEST_BYTES[world.device.type]:
        reductions.append(_all_reduce(world, size))
        size *= 16
    return reductions


def _all_reduce(world: World, size: int) -> Reduction:
    """Measure sums of `size` bytes.

    Each rank adds its number to the same pattern, so that a sum of the wrong ranks differs from the right one. Two ranks:

        rank 0      0 1 2 3 …
        rank 1      1 2 3 4 …
        expected    1 3 5 7 …    pattern × 2 + (0 + 1)
    """
    count = size // 4
    pattern = (torch.arange(count, device=world.device) % _PATTERN).float()
    total = process_group.sum_(pattern + world.rank, world)
    expected = pattern * world.size + world.size * (world.size - 1) // 2
    right = process_group.gather(torch.equal(total, expected), world)

    numbers = torch.zeros(count, device=world.device)
    mine = _median_seconds(lambda: process_group.sum_(numbers, world), world)
    # An all-reduce has ended when it has on the slowest rank.
    seconds = max(process_group.gather(mine, world))
    speed = size / seconds / 1e9
    return Reduction(
        bytes=size,
        seconds=seconds,
        gb_per_second=speed,
        bus_gb_per_second=speed * 2 * (world.size - 1) / world.size,
        wrong_ranks=tuple(rank for rank, is_right in enumerate(right) if not is_right),
    )


def measure_links(world: World) -> list[Link]:
    """Measure the speed from each rank to the next, one pair at a time while the others are silent."""
    if world.size == 1:
        return []
    pairs = [(rank, (rank + 1) % world.size) for rank in range(world.size)]
    # Of two ranks both pairs are the same link.
    if world.size == 2:
        pairs = [(0, 1)]
    mine = [_link_seconds(pair, world) for pair in pairs]
    seconds_of_ranks = process_group.gather(mine, world)
    links = []
    for index, pair in enumerate(pairs):
        # Ranks that are no part of the pair have 0.
        seconds = max(of_rank[index] for of_rank in seconds_of_ranks)
        links.append(Link(pair, seconds, _LINK_BYTES / seconds / 1e9))
    return links


def _link_seconds(pair: tuple[int, int], world: World) -> float:
    """Return the seconds for a message from one of the pair to the other; 0 on ranks that are neither."""
    process_group.barrier(world)
    if world.rank not in pair:
        return 0.0
    message = torch.zeros(_LINK_BYTES // 4, device=world.device)
    first, second = pair
    if world.rank == first:
        round_trip = _median_seconds(lambda: _ping(message, second), world)
    else:
        round_trip = _median_seconds(lambda: _pong(message, first), world)
    return round_trip / 2


def _ping(message: Tensor, other: int) -> None:
    """Send a message and wait until it comes back."""
    with process_group.peers():
        dist.send(message, other)
        dist.recv(message, other)


def _pong(message: Tensor, other: int) -> None:
    """Wait for a message and send it back."""
    with process_group.peers():
        dist.recv(message, other)
        dist.send(message, other)


def measure_compute(world: World) -> list[float]:
    """Return the seconds that each rank needs for the same work without the others, all at once; by rank."""
    side = 256
    if world.device.type == "cuda":
        side = 4096
    matrix = torch.ones(side, side, device=world.device)
    # The first product sets libraries up.
    matrix @ matrix
    process_group.barrier(world)
    wait_for_device(world.device)
    began = time.perf_counter()
    # Not the typical time of short pieces: a rank with too little CPU does most of them fast and then stands still.
    for _ in range(_PRODUCTS):
        matrix @ matrix
    wait_for_device(world.device)
    return process_group.gather(time.perf_counter() - began, world)


def measure_volume(path: Path, rank: int) -> Volume:
    """Write a file to the folder durably, read it back, and remove it."""
    if not path.is_dir():
        return Volume(rank, str(path), 0, None, "is no folder")
    free = files.free_bytes(path)
    mib = VOLUME_MIB
    if free < mib * MIB:
        problem = f"has {free / MIB:.0f} MiB free, {mib} MiB were to be written"
        return Volume(rank, str(path), free, None, problem)
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
    """Return the seconds until everything was durable; None when what is read differs."""
    # Random bytes, so that a file system that compresses gains nothing.
    block = os.urandom(MIB)
    began = time.perf_counter()
    with open(path, "xb") as file:
        for _ in range(mib):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    written = hashlib.sha256()
    for _ in range(mib):
        written.update(block)
    if files.sha256_file(path) != written.hexdigest():
        return None
    return seconds


def outliers(seconds: Sequence[float], factor: float) -> dict[int, float]:
    """Return those that take more than `factor` times the median of all others: index → how many times.

    With a factor of 2, of 1.0, 1.1 and 3.0 s the last takes 3.0 / 1.05 = 2.9 times as long: {2: 2.9}.
    """
    if len(seconds) < 2:
        return {}
    ratios = {}
    for index, value in enumerate(seconds):
        others = [*seconds[:index], *seconds[index + 1 :]]
        ratio = value / statistics.median(others)
        if ratio > factor:
            ratios[index] = ratio
    return ratios


def _median_seconds(work: Callable[[], object], world: World) -> float:
    """Return the typical seconds of `work`; the first time, which sets things up, does not count."""
    times = []
    for _ in range(_REPEATS + 1):
        wait_for_device(world.device)
        began = time.perf_counter()
        work()
        wait_for_device(world.device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])
