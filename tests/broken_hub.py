"""A hub that answers everything in one wrong way, which can be changed: what networks, proxies and outages do."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import ThreadingHTTPServer

from tests import hub

# `cut` and `stalled`: all is well until half of a file has been sent; `swapped`: until a page comes in place of each
# file; `well`: all is well, with the files of `held`. `refused` is no way: serve nothing.
WAYS = (
    "reset",
    "500",
    "429",
    "come back later",
    "slow",
    "truncated",
    "garbage",
    "other JSON",
    "cut",
    "stalled",
    "swapped",
    "401",
    "403",
    "404",
)


class BrokenHub(ThreadingHTTPServer):
    """`way`: one of WAYS."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Connection)
        self.way = "500"
        self.asked = 0
        self.held: Mapping[str, bytes] = {
            "config.json": b"{}" * 5000,
            "train.jsonl": b'{"a": 1}\n' * 2000,
        }
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: a cut connection is expected."""


class _Repositories(dict[str, Mapping[str, bytes]]):
    """Any that is asked for, each with the same files."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__()
        self._files = files

    def get(self, name: object, default: object = None) -> Mapping[str, bytes]:  # type: ignore[override]
        return self._files


class _Connection(hub.Connection):
    server: BrokenHub

    def do_GET(self) -> None:
        self.server.asked += 1
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        way = self.server.way
        self.held = _Repositories(self.server.held)
        is_content = self.command == "GET" and "/resolve/" in self.path
        if way in ("well", "cut", "stalled") or (way == "swapped" and not is_content):
            super().do_GET()
        elif way == "reset":
            self._reset()
        elif way == "slow":
            self.server.ended.wait(60)
        elif way == "come back later":
            self._answer(429, b"{}", {"Retry-After": "3600"})
        elif way == "truncated":
            self._answer(200, b'{"id": "org/mo', {"Content-Length": "1000"})
        elif way in ("garbage", "swapped"):
            self._answer(200, b"<html><body>Log in to the hotel's network</body></html>")
        elif way == "other JSON":
            self._answer(200, b'{"status": "logged out"}')
        else:
            headers = {"X-Error-Code": "RepoNotFound"} if way == "404" else {}
            self._answer(int(way), json.dumps({"error": "said the hub"}).encode(), headers)

    do_HEAD = do_POST = do_PUT = do_GET

    def _send(self, content: bytes) -> None:
        if self.server.way in ("cut", "stalled") and "/resolve/" in self.path:
            self.wfile.write(content[: len(content) // 2])
            self.server.ended.wait(60 if self.server.way == "stalled" else 0)
            self._reset()
        else:
            super()._send(content)

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


@contextmanager
def serving(port: int = 0) -> Iterator[BrokenHub]:
    """Yield a broken hub while the block runs."""
    with BrokenHub(port) as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            hub.ended.set()
            hub.shutdown()
            thread.join()
