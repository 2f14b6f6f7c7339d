"""A hub that answers everything in one wrong way, which can be changed: what networks, proxies and outages do."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WAYS = ("refused", "reset", "500", "429", "slow", "truncated", "garbage", "401", "403", "404")


class BrokenHub(ThreadingHTTPServer):
    """`way`: one of WAYS. With `refused` nobody listens at `url`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.way = "500"
        self.asked = 0
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A cut connection is nothing to print."""


class _Connection(BaseHTTPRequestHandler):
    server: BrokenHub

    def do_GET(self) -> None:
        self.server.asked += 1
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        way = self.server.way
        if way == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        elif way == "slow":
            self.server.ended.wait(60)
        elif way == "truncated":
            self._answer(200, b'{"id": "org/mo', 1000)
        elif way == "garbage":
            self._answer(200, b"<html><body>Log in to the hotel's network</body></html>")
        else:
            headers = {"X-Error-Code": "RepoNotFound"} if way == "404" else {}
            self._answer(int(way), json.dumps({"error": "said the hub"}).encode(), **headers)

    do_HEAD = do_POST = do_PUT = do_GET

    def _answer(self, status: int, content: bytes, length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length or len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[BrokenHub]:
    """A broken hub while the block runs."""
    with BrokenHub() as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            hub.ended.set()
            hub.shutdown()
            thread.join()
