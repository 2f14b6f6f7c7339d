"""Servers that a run here is to ask, and that nobody can reach now: a warning, since they may come up later.

A run asks again for as long as its `timeout_seconds` say, and its rank names the server; this says it before.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from kubetune.config.schema import DistillConfig
from kubetune.config.schema.grpo import ServersConfig

# For all servers together. Who has said nothing by then is not judged.
_SECONDS: Final = 1.0
_PORTS: Final = {"http": 80, "https": 443}


def unreachable_servers(
    task: str, servers: ServersConfig | None, distill: DistillConfig
) -> list[str]:
    """Return a sentence for each server of a run that cannot be reached now."""
    reasons: dict[str, str] = {}
    deadline = time.monotonic() + _SECONDS
    # In threads, since looking up a name knows no limit of time.
    threads = []
    asked = list(_servers(task, servers, distill))
    for url, _, _ in asked:
        thread = threading.Thread(target=_try, args=(url, reasons), daemon=True)
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    sentences = []
    for url, key, seconds in asked:
        if url in reasons:
            sentences.append(
                f"{key}: nobody answers at {url} ({reasons[url]}); the run asks for up to {seconds:g} s, so start "
                "that server by then"
            )
    return sentences


def _servers(
    task: str, servers: ServersConfig | None, distill: DistillConfig
) -> Iterator[tuple[str, str, float]]:
    """Yield each server that the task asks, the key that names it, and for how many seconds it is asked."""
    if task == "grpo" and servers is not None:
        for url in servers.urls:
            yield url, "grpo.servers", servers.timeout_seconds
    if task == "distill":
        for url in distill.urls:
            yield url, "distill.teacher", distill.timeout_seconds


def _try(url: str, reasons: dict[str, str]) -> None:
    """Connect to a server, and keep the reason if that is refused."""
    parts = urlsplit(url)
    port = parts.port or _PORTS.get(parts.scheme, 80)
    try:
        socket.create_connection((parts.hostname or "", port), _SECONDS).close()
    except TimeoutError:
        reasons[url] = "it is silent"
    except OSError as error:
        reasons[url] = error.strerror or str(error)
