"""Measurements that ranks take together: all-reduce, the links between neighbours, each rank's own speed, and volumes.

All ranks call each function; all but `measure_volume` return the same on each. Not for judging (checks.py).
"""

from __future__ import annotations

import errno
import hashlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kubetune.base import files
from kubetune.distributed import process_group
from kubetune.distributed.process_group import World, wait_for_device

MIB = 1 << 20
# Written to each volume, and read.
VOLUME_MIB = 64
LINK_BYTES = 4 * MIB
_REPEATS = 7
# Products of matrices that each rank computes.
_PRODUCTS = 128
# Whole numbers below this stay whole in fp32 when 16,000 ranks add them.
_PATTERN = 1021


def find_wrong_sums(size: int, world: World) -> list[int]:
    """Return the ranks on which a sum of `size` bytes over all ranks is wrong.

    Each rank adds its number to the same pattern, so that a sum of the wrong ranks differs from the right one. Two ranks:

        rank 0      0 1 2 3 …
        rank 1      1 2 3 4 …
        expected    1 3 5 7 …    pattern × 2 + (0 + 1)
    """
    pattern = (torch.arange(size // 4, device=world.device) % _PATTERN).float()
    total = process_group.sum_(pattern + world.rank, world)
    expected = pattern * world.size + world.size * (world.size - 1) // 2
    right = process_group.gather(torch.equal(total, expected), world)
    return [rank for rank, is_right in enumerate(right) if not is_right]


def all_reduce_seconds(size: int, world: World) -> float:
    """Return the typical seconds of a sum of `size` bytes over all ranks."""
    numbers = torch.zeros(size // 4, device=world.device)
    mine = _median_seconds(lambda: process_group.sum_(numbers, world), world)
    # An all-reduce has ended when it has on the slowest rank.
    slowest: float = max(process_group.gather(mine, world))
    return slowest


def link_seconds(pair: tuple[int, int], world: World) -> float:
    """Return the seconds for a message from one of the pair to the other, while all others wait."""
    mine = 0.0
    if world.rank in pair:
        message = torch.zeros(LINK_BYTES // 4, device=world.device)
        mine = _median_seconds(lambda: _send_and_return(message, pair, world), world) / 2
    seconds: float = max(process_group.gather(mine, world))
    return seconds


def _send_and_return(message: Tensor, pair: tuple[int, int], world: World) -> None:
    """Send a message from the first of a pair to the second, and back."""
    first, second = pair
    with process_group.peers():
        if world.rank == first:
            dist.send(message, second)
            dist.recv(message, second)
        else:
            dist.recv(message, first)
            dist.send(message, first)


def measure_compute(world: World) -> list[float]:
    """Return the seconds that each rank needs for the same work without the others, all at once; by rank."""
    side = 4096 if world.device.type == "cuda" else 256
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


def measure_volume(folder: Path, rank: int) -> dict[str, Any]:
    """Write a file to a folder durably, read it back, and remove it."""
    volume = {
        "rank": rank,
        "path": str(folder),
        "free_bytes": 0,
        "write_mib_per_second": None,
        "problem": None,
    }
    target = files.temporary_sibling(folder / "kubetune-smoke")
    try:
        if not folder.is_dir():
            raise OSError(errno.ENOTDIR, "is no folder")
        volume["free_bytes"] = files.free_bytes(folder)
        volume["write_mib_per_second"] = VOLUME_MIB / _write_and_read(target)
    except OSError as error:
        volume["problem"] = error.strerror or str(error)
    finally:
        with suppress(OSError):
            target.unlink()
    return volume


def _write_and_read(path: Path) -> float:
    """Return the seconds until everything was durable. Raise OSError if what is read differs, or there is no room."""
    free_mib = files.free_bytes(path.parent) / MIB
    if free_mib < VOLUME_MIB:
        message = f"has {free_mib:.0f} MiB free, {VOLUME_MIB} MiB were to be written"
        raise OSError(errno.ENOSPC, message)
    # Random bytes, so that a file system that compresses gains nothing.
    block = os.urandom(MIB)
    began = time.perf_counter()
    with open(path, "xb") as file:
        for _ in range(VOLUME_MIB):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    written = hashlib.sha256(block * VOLUME_MIB)
    if files.sha256_file(path) != written.hexdigest():
        raise OSError(errno.EIO, "gave back other bytes than were written")
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
