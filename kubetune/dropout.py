"""Dropout on a CPU with sixteen random bits for each number: torch draws them one number at a time, for 5 % of a step.

The probability is rounded to a multiple of 1/65,536, and what is kept is scaled by what it then is, so that the
expectation stays exact. Numbers come from torch's generator: what seeds that decides these too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_STEPS = 2**16
_SMALLEST = 2**12
"""Tensors of fewer numbers are left to torch."""


def dropout(x: Tensor, p: float) -> Tensor:
    """`F.dropout` in training: each number is zero with probability `p`, and the others grow by 1 / (1 - p)."""
    dropped = round(p * _STEPS)
    if x.device.type != "cpu" or x.numel() < _SMALLEST or not 0 < dropped < _STEPS:
        return F.dropout(x, p)
    # The whole range of int64: without bounds torch leaves out the sign bit.
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    kept = bits[: x.numel()].view(x.shape) >= dropped - _STEPS // 2
    return x * kept.to(x.dtype).mul_(_STEPS / (_STEPS - dropped))
