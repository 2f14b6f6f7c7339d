"""A proxy in front of a server that breaks its answers in chosen ways, as networks, proxies and outages do."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# `slow`: a byte of the head every tenth of a second, for ever. `429` asks to be left alone for an hour.
WAYS = ("refused", "reset", "cut", "silent", "slow", "garbage", "401", "403", "404", "429", "500")

# The right answer, whose content comes a byte every tenth of a second.
DRIP = "drip"
# The request arrives, and nothing comes back.
WITHHELD = "withheld"


class BrokenStore(ThreadingHTTPServer):
    """`way`: one of WAYS, or "" to pass on to `behind`.

    `healthy`: requests to pass on first. `until`: a text in the first line of the first request that breaks.
    """

    daemon_threads = True

    def __init__(self, behind: str = "", way: str = "", healthy: int = 0, until: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.behind = behind
        self.way = way
        self.healthy = healthy
        self.until = until
        self.asked = 0
        self.has_broken = False
        self.arrived = threading.Event()  # a request whose answer is withheld
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: a cut connection is expected."""


class _Connection(BaseHTTPRequestHandler):
    server: BrokenStore
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def _answer(self) -> None:
        self.server.asked += 1
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.has_broken |= (
            self.server.asked > self.server.healthy and self.server.until in self.requestline
        )
        if not self.server.has_broken or not self.server.way:
            self._pass_on(body)
        elif self.server.way in ("refused", "reset"):
            self._reset()
        elif self.server.way == "silent":
            self.server.ended.wait(300)
        elif self.server.way == "slow":
            with suppress(OSError):
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
                self._drip(itertools.repeat(b"x"))
        elif self.server.way == DRIP:
            self._pass_on(body)
        elif self.server.way == WITHHELD:
            urllib.request.urlopen(self._request(body)).close()
            self.server.arrived.set()
            self.server.ended.wait(300)
        elif self.server.way == "cut":
            self._send(200, b'{"run', {"Content-Length": "1000"})
            self._reset()
        elif self.server.way == "garbage":
            self._send(200, b"<html><body>Log in to the hotel's network</body></html>")
        else:
            self._send(int(self.server.way), b'{"error": "no"}', {"Retry-After": "3600"})

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = _answer

    def _request(self, body: bytes) -> urllib.request.Request:
        headers = {
            name: value for name, value in self.headers.items() if name.lower() != "connection"
        }
        # Without a type, urllib would declare the body to be a form.
        headers = {"Content-Type": "application/octet-stream", **headers}
        return urllib.request.Request(
            self.server.behind + self.path, data=body or None, headers=headers, method=self.command
        )

    def _pass_on(self, body: bytes) -> None:
        try:
            with urllib.request.urlopen(self._request(body)) as answer:
                self._send(answer.status, answer.read(), dict(answer.headers))
        except urllib.error.HTTPError as refusal:
            self._send(refusal.code, refusal.read(), dict(refusal.headers))

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        kept = {
            k: v
            for k, v in (headers or {}).items()
            if k.lower() not in ("transfer-encoding", "connection")
        }
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **kept}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            if self.server.way == DRIP and self.server.has_broken:
                self._drip(content[at : at + 1] for at in range(len(content)))
            else:
                self.wfile.write(content)

    def _drip(self, content: Iterable[bytes]) -> None:
        for byte in content:
            if self.server.ended.wait(0.1):
                break
            self.wfile.write(byte)

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


@contextmanager
def serving(
    behind: str = "", way: str = "", healthy: int = 0, until: str = ""
) -> Iterator[BrokenStore]:
    """Yield a broken store while the block runs; of way `refused` only its port, after the healthy requests."""
    with BrokenStore(behind, way, healthy, until) as store:
        thread = threading.Thread(target=store.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield store
        finally:
            store.ended.set()
            store.shutdown()
            thread.join()
