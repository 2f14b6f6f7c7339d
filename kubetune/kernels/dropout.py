"""Dropout on a CPU with sixteen random bits for each number: torch draws them one number at a time, for 5 % of a step.

The probability is rounded to a multiple of 1/65,536, and what is kept is scaled by what it then is, so that the
expectation stays exact. Numbers come from torch's generator: what seeds that decides these too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_STEPS = 2**16  # values of sixteen bits
_SMALLEST = 2**12  # tensors of fewer numbers are left to torch


def seed(number: int, device: torch.device) -> None:
    """Seed torch's generators of numbers on a device and on the CPU."""
    if device.type == "cpu":
        # torch.manual_seed keeps a stack trace for each accelerator that is not in use: milliseconds, never freed.
        torch.default_generator.manual_seed(number)
    else:
        torch.manual_seed(number)


def dropout(x: Tensor, p: float) -> Tensor:
    """Return `x` with each number zero by probability `p`, and the others times 1 / (1 - p)."""
    if not _is_drawn_by_bits(x, p):
        return F.dropout(x, p)
    kept, growth = draw(x, p)
    return x * numbers(kept, x.dtype).mul_(growth)


def draw(x: Tensor, p: float) -> tuple[Tensor, float]:
    """Return the mask of numbers that dropout keeps, bool of x's shape, and the factor of these."""
    if not _is_drawn_by_bits(x, p):
        return torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p), 1 / (1 - p)
    words = torch.empty(-(-x.numel() // 4), dtype=torch.int64)
    # The whole range of int64: without bounds torch leaves out the sign bit.
    words.random_(-(2**63), None)
    bits = words.view(torch.int16)[: x.numel()].view(x.shape)
    dropped = round(p * _STEPS)
    # Sixteen bits stand for -32,768 to 32,767: the lowest `dropped` values are dropped.
    return bits >= dropped - _STEPS // 2, _STEPS / (_STEPS - dropped)


def numbers(kept: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as ones and zeros of `dtype`."""
    # Of bools torch makes these one by one, which takes ten times as long as of bytes.
    return kept.view(torch.uint8).to(dtype)


def _is_drawn_by_bits(x: Tensor, p: float) -> bool:
    if torch.compiler.is_compiling():
        return False  # what is compiled draws its numbers within the loop that uses them
    return x.device.type == "cpu" and x.numel() >= _SMALLEST and 0 < round(p * _STEPS) < _STEPS
