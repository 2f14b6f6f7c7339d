"""Measurements that ranks take together: all-reduce, the links between neighbours, each rank's own speed, and volumes.

All ranks call each function; all but `measure_volume` return the same on each. Not for judging (checks.py).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kubetune.base import files
from kubetune.distributed import process_group
from kubetune.distributed.process_group import World, wait_for_device

MIB = 1 << 20
# Written to each volume, and read.
VOLUME_MIB = 64
LINK_BYTES = 4 * MIB


def is_sum_wrong(size: int, world: World) -> bool:
    """True if a sum of `size` bytes over all ranks is wrong on one of them.

    Rank 0 gives ones, rank 1 twos, and so on: three ranks must get 1 + 2 + 3 = 6 everywhere.
    """
    sums = torch.full((size // 4,), world.rank + 1.0, device=world.device)
    process_group.sum_(sums, world)
    expected = world.size * (world.size + 1) // 2
    return process_group.agree(bool((sums != expected).any()), world)


def all_reduce_seconds(size: int, world: World) -> float:
    """Return the seconds of a sum of `size` bytes over all ranks."""
    numbers = torch.zeros(size // 4, device=world.device)
    times = _times(lambda: process_group.sum_(numbers, world), world)
    mine = statistics.median(times)
    # An all-reduce has ended when it has on the slowest rank.
    slowest: float = max(process_group.gather(mine, world))
    return slowest


def link_seconds(first: int, second: int, world: World) -> float:
    """Return the seconds for a message from one rank to another, while all others wait."""
    message = torch.zeros(LINK_BYTES // 4, device=world.device)
    times = [0.0]
    with process_group.peers():
        if world.rank == first:
            times = _times(lambda: dist.send(message, second), world)
        elif world.rank == second:
            times = _times(lambda: dist.recv(message, first), world)
    # The receiver's: a sender may be done as soon as the message has left.
    seconds: float = max(process_group.gather(statistics.median(times), world))
    return seconds


def compute_seconds(world: World) -> list[float]:
    """Return the seconds that each rank needs for the same work without the others, all at once; by rank."""
    side = 4096 if world.device.type == "cuda" else 256
    matrix = torch.ones(side, side, device=world.device)
    process_group.barrier(world)
    times = _times(lambda: matrix @ matrix, world, repeats=128)
    # Not the median: a rank with too little CPU does most products fast, and then stands still.
    return process_group.gather(sum(times), world)


def measure_volume(folder: Path, rank: int) -> dict[str, Any]:
    """Write a file to a folder durably, read it back, and remove it."""
    volume: dict[str, Any] = {"rank": rank, "path": str(folder), "problem": None}
    # Random bytes, so that a file system that compresses gains nothing.
    content = os.urandom(VOLUME_MIB * MIB)
    target = files.temporary_sibling(folder / "kubetune-smoke")
    try:
        volume["free_bytes"] = files.free_bytes(folder)
        began = time.perf_counter()
        with open(target, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        volume["write_mib_per_second"] = VOLUME_MIB / (time.perf_counter() - began)
        if target.read_bytes() != content:
            volume["problem"] = "gave back other bytes than were written"
    except OSError as error:
        volume["problem"] = error.strerror or str(error)
    finally:
        with suppress(OSError):
            target.unlink()
    return volume


def outliers(seconds: list[float], factor: float) -> dict[int, float]:
    """Return those that take more than `factor` times the median of all others: index → how many times.

    With a factor of 2, of 1.0, 1.1 and 3.0 s the last takes 3.0 / 1.05 = 2.9 times as long: {2: 2.9}.
    """
    ratios = {}
    for index, value in enumerate(seconds):
        others = seconds[:index] + seconds[index + 1 :]
        # One alone is not slow.
        ratio = value / statistics.median(others or seconds)
        if ratio > factor:
            ratios[index] = ratio
    return ratios


def _times(work: Callable[[], object], world: World, repeats: int = 8) -> list[float]:
    """Return the seconds of each repeat of `work`. The first time, which sets things up, does not count."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        wait_for_device(world.device)
        times.append(time.perf_counter() - began)
    return times[1:]
