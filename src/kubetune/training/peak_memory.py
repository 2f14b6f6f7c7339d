"""The memory that a rank took at its peak."""

from __future__ import annotations

import resource
import sys

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """Return the highest memory so far: allocated on the GPU, or resident in RAM."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    # It never falls, so it covers what happened between two steps too.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    return peak * 1024  # Linux counts in KiB
