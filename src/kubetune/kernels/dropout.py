"""Dropout of an adapter's input, as a mask that the backward uses again, and the seed that decides what is dropped."""

from __future__ import annotations

import torch
from torch import Tensor


def seed(number: int, device: torch.device) -> None:
    """Seed torch's generators of numbers on a device and on the CPU."""
    if device.type == "cpu":
        # torch.manual_seed keeps a stack trace for each accelerator that is not in use: milliseconds, never freed.
        torch.default_generator.manual_seed(number)
    else:
        torch.manual_seed(number)


def draw(x: Tensor, p: float) -> tuple[Tensor, float]:
    """Return the mask of numbers that dropout keeps, bool of x's shape, and the factor of these."""
    # A byte for each number is all that the backward keeps of it.
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
    return mask, 1 / (1 - p)


def numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as ones and zeros of `dtype`."""
    # torch draws bools one by one, which takes ten times as long as drawing bytes.
    return mask.view(torch.uint8).to(dtype)
