"""A connection between two agents: a line of JSON for each message. The kernel says if the other side is gone."""

from __future__ import annotations

import errno
import json
import socket
import time
from contextlib import suppress
from typing import Any

# A machine that answers nothing for so long is lost. Changed by tests alone.
SILENT_SECONDS = 40.0

_LONGEST_MESSAGE = 1 << 16  # bytes
_OF_MACHINE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)


class Gone(Exception):
    """The other side of a connection is gone, and why."""


class Connection:
    """A connection between two agents."""

    def __init__(self, link: socket.socket) -> None:
        self._socket = link
        self._text = b""
        self.node: int | None = None  # of the other side, once it has said so
        self.host = ""
        self.has_ended_well = False
        self.has_said_why = False  # it ended, and not well
        self.has_spoken = False
        self.since = time.monotonic()
        _let_kernel_watch(link)
        link.setblocking(False)

    def fileno(self) -> int:
        """Return the file descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Send one message. One that cannot be sent is dropped: reading then says why."""
        with suppress(OSError):
            self._socket.send(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have come. Raise Gone if the other side is gone, or is none of ours."""
        try:
            data = self._socket.recv(_LONGEST_MESSAGE)
        except BlockingIOError:
            return []
        except OSError as error:
            if error.errno in _OF_MACHINE:
                silence = f"has not answered for {SILENT_SECONDS:g} s"
                raise Gone(f"{silence}: its machine or its network is gone") from error
            data = b""
        if not data:
            if not self.has_spoken:
                raise Gone(
                    "closes connections without an answer: another program listens there, or another version of kubetune"
                )
            raise Gone("is gone: its agent was killed, or its pod was deleted")

        *lines, self._text = (self._text + data).split(b"\n")
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):  # brackets without end
                message = None
            if not isinstance(message, dict):
                raise Gone("is no agent of kubetune")
            messages.append(message)
        self.has_spoken = self.has_spoken or bool(messages)
        if len(self._text) > _LONGEST_MESSAGE:
            raise Gone("is no agent of kubetune")
        return messages

    def close(self) -> None:
        """End the connection. What was sent still arrives."""
        self._socket.close()

    @property
    def title(self) -> str:
        """Return the name of the node on the other side, for messages."""
        return f"node {self.node} on {self.host}"


def _let_kernel_watch(link: socket.socket) -> None:
    """Let the kernel break the connection if the other machine answers nothing for SILENT_SECONDS."""
    options = {
        # Asks after a quarter of the time, and then seven times.
        "TCP_KEEPIDLE": max(1, int(SILENT_SECONDS / 4)),
        "TCP_KEEPINTVL": max(1, int(SILENT_SECONDS / 8)),
        "TCP_KEEPCNT": 6,
        # The same for data that nobody acknowledges. In milliseconds.
        "TCP_USER_TIMEOUT": int(SILENT_SECONDS * 1000),
        "TCP_NODELAY": 1,
    }
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        # Other systems than Linux lack some of them.
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
