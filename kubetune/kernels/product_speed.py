"""Speed of bare matrix products: of a device, for a run's speed as a share of it, and of a core in two dtypes."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from kubetune.distributed.process_group import wait_for_device
from kubetune.kernels.products import times
from kubetune.plan.measured import DTYPES

_CPU_SIZE, _GPU_SIZE = 512, 8192
_SECONDS = 0.05

SIZE = 256
"""Of matrices that a core multiplies: the smallest whose products take the time, and not what is around them."""
SECONDS, MOST_SERIES, SPREAD = 0.012, 5, 1.3
"""Of a series of products; how many there are at most, and how far apart two may lie that agree, as a ratio."""


def of_device(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """TFLOP/s of the fastest bare matrix product of a twentieth of a second, three at least, and what was multiplied.
    The fastest, since what else the machine does only slows them."""
    size = _GPU_SIZE if device.type == "cuda" else _CPU_SIZE
    left = torch.full((size, size), 0.5, dtype=dtype, device=device)
    right, took = left.clone(), list[float]()
    times(left, right)  # the first prepares the kernel
    while len(took) < 3 or sum(took) < _SECONDS:
        wait_for_device(device)
        began = time.perf_counter()
        times(left, right)
        wait_for_device(device)
        took.append(time.perf_counter() - began)
    kind = str(dtype).removeprefix("torch.")
    return 2 * size**3 / min(took) / 1e12, f"measured: a {size} × {size} {kind} product"


def of_core() -> tuple[dict[str, float], bool]:
    """TFLOP/s of one core in each dtype, the best of short series of bare products; and whether two of them agree.

    By the time that the core gave to this thread, so that others, who may use the machine, count little.
    """
    operands = {name: torch.full((SIZE, SIZE), 0.5, dtype=getattr(torch, name)) for name in DTYPES}
    threads, series = torch.get_num_threads(), list[dict[str, float]]()
    torch.set_num_threads(1)
    try:
        _series(operands, 0.0)  # prepares the kernels
        while len(series) < 2 or (len(series) < MOST_SERIES and not _agree(*series[-2:])):
            series.append(_series(operands, SECONDS))
    finally:
        torch.set_num_threads(threads)
    return {name: max(one[name] for one in series) for name in operands}, _agree(*series[-2:])


def _series(operands: Mapping[str, Tensor], seconds: float) -> dict[str, float]:
    best, until = dict.fromkeys(operands, 0.0), time.thread_time() + seconds
    while not min(best.values()) or time.thread_time() < until:
        for name, matrix in operands.items():  # in turns, as the clock of a core changes
            began = time.thread_time()
            times(matrix, matrix)
            best[name] = max(best[name], 2e-12 * SIZE**3 / max(time.thread_time() - began, 1e-9))
    return best


def _agree(one: Mapping[str, float], two: Mapping[str, float]) -> bool:
    return all(max(one[name], two[name]) <= SPREAD * min(one[name], two[name]) for name in one)
