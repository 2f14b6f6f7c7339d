"""What vLLM servers take: options of their command line, ranks of adapters, and how their addresses look."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from kubetune.errors import ConfigError

# What `--max-lora-rank` may be.
LORA_RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)

_DEFAULTS: Final = {"dtype": "auto", "tensor_parallel_size": 1}


def options(**values: str | int | None) -> list[str]:
    """Return options of `vllm serve` in this order, without those that say what it does by itself.

    options(dtype="auto", max_model_len=4096, enable_lora=True) are ["--max-model-len=4096", "--enable-lora"].
    """
    words = []
    for name, value in values.items():
        if not value or value == _DEFAULTS.get(name):
            continue
        option = f"--{name.replace('_', '-')}"
        words.append(option if value is True else f"{option}={value}")
    return words


def lora_rank(highest: int) -> int:
    """Return the smallest `--max-lora-rank` that holds adapters of at most this rank, which is no more than 512."""
    return next(rank for rank in LORA_RANKS if rank >= highest)


def is_address(url: str) -> bool:
    """True for http://HOST:PORT/PATH: a name, a password or a query would not reach the server."""
    if not re.fullmatch(r"https?://[^/?#@\s]+(/[^?#\s]*)?", url):
        return False
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not close, or a port that is none
        return False


def require_address(url: str) -> None:
    """Raise ConfigError for what is no address of a server."""
    if not is_address(url):
        raise ConfigError(
            f"the server's address is {url or 'missing'}; expected one such as http://localhost:8000, without a password"
        )


def problems_of_addresses(key: str, urls: Sequence[str]) -> list[str]:
    """Return what is wrong with the addresses of servers, each as a problem. `key`: of the section that has them."""
    problems = []
    for url in urls:
        if not is_address(url):
            problems.append(f"{key}: found {url}; expected such as http://10.0.0.7:8000")
        elif re.search(r"/v1/?$", url):
            problems.append(
                f"{key}: found {url}; expected it without /v1, as servers are asked beside it too"
            )
    if len(set(urls)) < len(urls):
        problems.append(f"{key}: a server is named twice; expected each once")
    return problems
