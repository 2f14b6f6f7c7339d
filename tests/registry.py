"""A registry on this machine for tests: the OCI distribution spec as far as pushes and pulls need it.

It can ask for a login, break connections, answer with a status, send downloads elsewhere and give back other bytes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

USER = "ada"
PASSWORD = "lovelace-1815"
TOKEN = "a-token-of-this-test"


class Registry(ThreadingHTTPServer):
    """Blobs by digest, manifests by tag or digest, and what was asked for, in order."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.login: str | None = None  # "basic" or "bearer"
        self.unknown: set[str] = set()  # repositories that may not be made
        self.breaks: Counter[str] = Counter()  # connections still to cut half-way, by method
        self.answers: dict[str, list[int]] = {}  # statuses still to answer with, by method
        self.damaged: set[str] = set()  # digests of blobs that come back with another byte
        self.realm: str | None = None  # of the token server; None: this one
        self.store: str | None = None  # where downloads are sent to
        self.uploads: str | None = None  # where uploads are sent to
        self.secrets_at_store: list[str | None] = []  # also those for a token

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def sent(self) -> int:
        """Return how many blobs have been sent."""
        return sum(line.startswith("PUT") and "/blobs/" in line for line in self.requests)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a cut connection is expected."""


class _Connection(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Registry

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self._read_blob_or_manifest()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/token":
            self._token(parse_qs(urlsplit(self.path).query))
        elif path.startswith("/store/"):
            self.server.secrets_at_store.append(self.headers.get("Authorization"))
            if self.server.login is None:
                self._answer(200, self.server.blobs[path.removeprefix("/store/")])
            else:
                self._ask_for_login()
        else:
            self._read_blob_or_manifest()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if urlsplit(self.path).path == "/token":
            self._token(parse_qs(body.decode()))
        elif self._may("POST"):
            place = f"{self.server.uploads or ''}{urlsplit(self.path).path}an-upload?_state=a%3Db"
            self._answer(202, b"", {"Location": place})

    def do_PUT(self) -> None:
        url = urlsplit(self.path)
        length = int(self.headers["Content-Length"])
        if self.server.breaks["PUT"] > 0:
            self.server.breaks["PUT"] -= 1
            self.rfile.read(length // 2)
            # A reset, so that the client does not take it for an answer.
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.close_connection = True
            self.connection.close()
            return
        body = self.rfile.read(length)
        if url.path.startswith("/store/"):
            self.server.secrets_at_store.append(self.headers.get("Authorization"))
            self._ask_for_login()
            return
        if not self._may("PUT"):
            return
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        if "/manifests/" in url.path:
            self._put_manifest(url.path.rsplit("/", 1)[1], digest, body)
            return
        query = parse_qs(url.query)
        if query.get("digest") != [digest] or query.get("_state") != ["a=b"]:
            self._refuse(400, "DIGEST_INVALID", "provided digest did not match uploaded content")
            return
        self.server.blobs[digest] = body
        self._answer(201, b"")

    def _put_manifest(self, reference: str, digest: str, body: bytes) -> None:
        manifest = json.loads(body)
        for part in (manifest["config"], *manifest["layers"]):
            if len(self.server.blobs.get(part["digest"], b"")) != part["size"]:
                self._refuse(404, "MANIFEST_BLOB_UNKNOWN", "blob unknown to registry")
                return
        self.server.manifests[reference] = body
        self.server.manifests[digest] = body
        self._answer(201, b"")

    def _read_blob_or_manifest(self) -> None:
        if not self._may(self.command):
            return
        kind, reference = self.path.split("/")[-2:]
        known = self.server.blobs if kind == "blobs" else self.server.manifests
        if reference not in known:
            self._refuse(404, f"{kind.upper()[:-1]}_UNKNOWN", "unknown to registry")
            return
        content = known[reference]
        if reference in self.server.damaged:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if kind == "blobs" and self.server.store and self.command == "GET":
            self._answer(307, b"", {"Location": f"{self.server.store}/store/{reference}"})
            return
        self._answer(200, content)

    def _may(self, method: str) -> bool:
        """True if a request may go on; else it has been answered."""
        server = self.server
        server.requests.append(f"{method} {self.path}")
        name = re.sub("^/v2/|/(blobs|manifests)/.*$", "", self.path)
        if server.answers.get(method):
            self._refuse(server.answers[method].pop(0), "UNKNOWN", "not now")
        elif not self._is_logged_in(method, name):
            challenge = (
                f'Bearer realm="{server.realm or f"http://{server.host}/token"}",service="test",'
            )
            challenge += f'scope="repository:{name}:{self._rights(method)}"'
            if server.login == "basic":
                challenge = 'Basic realm="test"'
            self._refuse(401, "UNAUTHORIZED", "authentication required", challenge)
        elif name in server.unknown and method == "POST":
            self._refuse(404, "NAME_UNKNOWN", "repository name not known to registry")
        else:
            return True
        return False

    @staticmethod
    def _rights(method: str) -> str:
        return "pull" if method in ("GET", "HEAD") else "pull,push"

    def _is_logged_in(self, method: str, name: str) -> bool:
        header = self.headers.get("Authorization", "")
        if self.server.login is None:
            return True
        if self.server.login == "basic":
            return header == basic()
        rights = self._rights(method)
        granted = header.removeprefix(f"Bearer {TOKEN}:repository:{name}:")
        return granted != header and set(rights.split(",")) <= set(granted.split(","))

    def _ask_for_login(self) -> None:
        """Answer as a host does that downloads are sent to, and that wants the login of the registry."""
        challenge = f'Bearer realm="http://{self.server.host}/token",service="test",scope="a:b:c"'
        self._refuse(401, "UNAUTHORIZED", "log in here", challenge)

    def _token(self, asked: dict[str, list[str]]) -> None:
        self.server.secrets_at_store.append(self.headers.get("Authorization"))
        is_known = self.headers.get("Authorization") == basic()
        if asked.get("refresh_token") == ["an-identity-token"] and self.command == "POST":
            is_known = True
        if not is_known or asked.get("service") != ["test"]:
            self._refuse(401, "UNAUTHORIZED", "incorrect username or password")
            return
        token = f"{TOKEN}:{asked['scope'][0]}"
        self._answer(200, json.dumps({"token": token}).encode())

    def _refuse(self, status: int, code: str, message: str, challenge: str | None = None) -> None:
        headers = {"WWW-Authenticate": challenge} if challenge else {}
        body = {"errors": [{"code": code, "message": message}]}
        self._answer(status, json.dumps(body).encode(), headers)

    def _answer(
        self, status: int, content: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def basic() -> str:
    """Return the header of the one who may log in."""
    return "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


@contextmanager
def serving() -> Iterator[Registry]:
    """Yield a registry while the block runs."""
    with Registry() as registry:
        thread = threading.Thread(target=registry.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield registry
        finally:
            registry.shutdown()
            thread.join()
