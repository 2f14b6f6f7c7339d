"""The speed of bare matrix products in the shapes of a model: what no trainer on this machine can exceed.

    python -m benchmarks.ceiling MODEL

prints the FLOP/s of bf16 products, forward and backward, of one layer's linear modules, with the threads that
OMP_NUM_THREADS gives.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from benchmarks.harness import environment, python_of
from benchmarks.models import SHAPES
from benchmarks.recorder import RESULT, report, synchronise
from benchmarks.results import ROOT, Results

if TYPE_CHECKING:
    from torch import Tensor

SUITE = "ceiling"


def measure_once(model: str, results: Results) -> None:
    """Add the ceiling of one thread, or of the GPU, to the results unless they have it."""
    if results.find(SUITE, {"model": model}) is not None:
        return
    command = [python_of("ours"), "-m", "benchmarks.ceiling", model]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(1), capture_output=True, text=True, check=True
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith(RESULT))
    results.add(SUITE, {"model": model}, json.loads(line.removeprefix(RESULT)))


def measure(model: str, repeats: int = 7) -> float:
    """Return the FLOP/s of all products of a layer, forward and backward, each at the best of several times."""
    import torch

    device = "cpu"
    tokens = 2048
    if torch.cuda.is_available():
        device = "cuda"
        tokens = 8192
    # Of each linear module the product of the forward, x Wᵀ, and that of the backward, dy W.
    flops = 0.0
    seconds = 0.0
    for inputs, outputs in SHAPES[model].linears:
        x = torch.randn(tokens, inputs, dtype=torch.bfloat16, device=device)
        weight = torch.randn(outputs, inputs, dtype=torch.bfloat16, device=device)
        y = x @ weight.T
        for left, right in ((x, weight.T), (y, weight)):
            flops += 2.0 * tokens * inputs * outputs
            seconds += min(_time(left, right) for _ in range(repeats))
    return flops / seconds


def _time(left: Tensor, right: Tensor, loops: int = 5) -> float:
    synchronise()
    start = time.perf_counter()
    for _ in range(loops):
        left @ right
    synchronise()
    return (time.perf_counter() - start) / loops


if __name__ == "__main__":
    report({"flops_per_second": measure(sys.argv[1])})
