"""What `vllm serve` takes of adapters."""

from __future__ import annotations

from typing import Final

# What `--max-lora-rank` may be.
LORA_RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)


def lora_rank(highest: int) -> int:
    """Return the smallest `--max-lora-rank` that holds adapters of at most this rank, which is no more than 512."""
    return next(rank for rank in LORA_RANKS if rank >= highest)
