"""Sockets that listen, and those that reach a host by its name."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from typing import Any

# Time for an address to answer at all.
_CONNECT_SECONDS = 2.0


class Lookup:
    """Looks the address of a host up, beside what waits for it.

    While no name server answers, the system's resolver takes up to a minute, in which this process would hear no request
    to stop.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._addresses: list[Any] = []
        self._error: Exception | None = None
        # A daemon: nobody waits for it at the end.
        self._thread = threading.Thread(target=self._look_up, name="look up", daemon=True)
        self._thread.start()

    def _look_up(self) -> None:
        try:
            self._addresses = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            self._error = error

    def result(self, seconds: float) -> list[Any] | None:
        """Return the addresses, None if there is no answer within `seconds`. Raise OSError or UnicodeError."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            return None
        if self._error is not None:
            raise self._error
        return self._addresses


def connected(addresses: Sequence[Any], name: str) -> socket.socket:
    """Return a socket that is connected to the first address that takes connections. Raise OSError if none does."""
    problem = OSError(f"{name} has no address")
    for address in addresses:
        try:
            return socket.create_connection(address[:2], _CONNECT_SECONDS)
        except OSError as error:
            problem = error
    raise problem


def listening(port: int) -> socket.socket:
    """Return a socket that takes connections at this port of all addresses. Raise OSError if it is taken."""
    listener = bound(port)
    try:
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def bound(port: int) -> socket.socket:
    """Return a socket that has this port of all addresses, any free one for 0."""
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    link = socket.socket(family, socket.SOCK_STREAM)
    try:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if has_both:
            link.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        link.bind(("", port))
    except OSError:
        link.close()
        raise
    return link
