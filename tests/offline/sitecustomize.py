"""Refuses connections to anything but this machine, and writing to the user's caches, in the process that imports it.

Python imports a `sitecustomize` it finds on PYTHONPATH by itself: tests/conftest.py puts this folder there, so that
the processes which tests start are held to the same rule as the tests. An audit hook cannot be taken off again.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
import sys
from typing import Any

_HOMES = [
    user.pw_dir for user in pwd.getpwall() if user.pw_uid == os.getuid()
]  # none in some containers
_CACHES = tuple(
    os.path.join(home, ".cache", name, "")
    for home in _HOMES
    for name in ("kubetune", "huggingface")
)
# Addresses and ports: `10.0.0.5 6443,10.0.0.6 6443`.
REAL_SERVERS = "KUBETUNE_REAL_SERVERS"
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def is_local(address: Any) -> bool:
    """True if a socket address stays on this machine: a Unix socket's path, or a loopback host.

    So does the API server of a real cluster, which tests/cluster/real names, for itself alone.
    """
    if not isinstance(address, tuple):
        return True
    host = str(address[0])
    if host in ("", "localhost"):
        return True
    if f"{host} {address[1]}" in os.environ.get(REAL_SERVERS, "").split(","):
        return True
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        return False
    return parsed.is_loopback or parsed.is_unspecified


def refuse_remote(event: str, args: tuple[Any, ...]) -> None:
    """Audit hook: raise where a socket is about to leave this machine."""
    if event in ("socket.connect", "socket.sendto") and not is_local(args[1]):
        # Not an OSError: what tries again, or goes on without the network, must not hide it.
        raise RuntimeError(
            f"tests connect to this machine only, and this would connect to {args[1]!r}"
        )


def refuse_the_users_caches(event: str, args: tuple[Any, ...]) -> None:
    """Audit hook: raise where a file of the caches in the home folder is about to be written."""
    if event == "open" and args[2] & _WRITES and str(args[0]).startswith(_CACHES):
        raise RuntimeError(f"tests keep caches of their own, and this would write {args[0]}")


sys.addaudithook(refuse_remote)
sys.addaudithook(refuse_the_users_caches)
