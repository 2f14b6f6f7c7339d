"""What vLLM servers take: ranks of adapters, and how their addresses look."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

# What `--max-lora-rank` may be.
LORA_RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)


def lora_rank(highest: int) -> int:
    """Return the smallest `--max-lora-rank` that holds adapters of at most this rank, which is no more than 512."""
    return next(rank for rank in LORA_RANKS if rank >= highest)


def problems_of_addresses(key: str, urls: Sequence[str]) -> list[str]:
    """Return what is wrong with the addresses of servers, each as a problem. `key`: of the section that has them."""
    problems = []
    for url in urls:
        if not re.fullmatch(r"https?://[^/?#@\s]+(/[^?#\s]*)?", url):
            problems.append(f"{key}: found {url}; expected such as http://10.0.0.7:8000")
        elif re.search(r"/v1/?$", url):
            problems.append(
                f"{key}: found {url}; expected it without /v1, as servers are asked beside it too"
            )
    if len(set(urls)) < len(urls):
        problems.append(f"{key}: a server is named twice; expected each once")
    return problems
