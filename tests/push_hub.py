"""A hub on this machine for tests: what the Hugging Face hub answers while a model repository is uploaded to.

It speaks the protocol that `huggingface_hub` uses without Xet: create, preupload, LFS batch with basic and multipart
transfers, verify, commit. Contents are checked against their SHA-256, and connections can be made to break.
"""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast
from urllib.parse import urlsplit

TOKEN = "hf_" + "t" * 34
# Larger objects are sent in parts of this size.
PART_BYTES = 64 * 1024


class Hub(ThreadingHTTPServer):
    """Repositories by name, objects by SHA-256, and what was asked for, in order."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.repos: dict[str, dict[str, Any]] = {}
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.requests: list[str] = []
        # How many connections still to cut half-way through the body: `PUT`, `POST`, and of those `commit`.
        self.breaks: Counter[str] = Counter()
        self.refusing: int | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def files(self, repo: str) -> dict[str, bytes]:
        """Return the newest commit of a repository."""
        return cast(dict[str, bytes], self.repos[repo]["files"])

    def sent(self) -> int:
        """Return how many objects, or parts of one, have been sent."""
        return sum(line.startswith("PUT") for line in self.requests)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a cut connection is expected."""


class _Connection(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.server.requests.append(f"GET {path}")
        if not self._is_known():
            return
        repo = "/".join(path.split("/")[3:5])
        if repo not in self.server.repos:
            self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif "/tree/" in path:
            sums = {
                name: hashlib.sha1(data).hexdigest()
                for name, data in self.server.files(repo).items()
            }
            self._answer(
                200,
                [
                    {"type": "file", "path": name, "size": 1, "oid": oid}
                    for name, oid in sums.items()
                ],
            )
        else:
            files = self.server.repos[repo]
            siblings = [{"rfilename": name} for name in files["files"]]
            self._answer(
                200,
                {
                    "id": repo,
                    "private": files["private"],
                    "sha": files["sha"],
                    "siblings": siblings,
                },
            )

    def do_POST(self) -> None:
        path = urlsplit(self.path).path
        self.server.requests.append(f"POST {path}")
        body = self._read("commit" if "/commit/" in path else "POST")
        if body is None or not (path.startswith("/complete/") or self._is_known()):
            return
        parts = path.strip("/").split("/")
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif path.endswith("/info/lfs/objects/batch"):
            self._batch(json.loads(body))
        elif parts[0] == "complete":
            self._complete(parts[1], json.loads(body))
        elif parts[0] == "verify":
            asked = json.loads(body)
            self._answer(
                200 if len(self.server.objects.get(asked["oid"], b"")) == asked["size"] else 404, {}
            )
        elif "preupload" in parts:
            self._preupload(json.loads(body))
        elif "commit" in parts:
            self._commit("/".join(parts[2:4]), body)
        else:
            self._answer(404, {"error": path})

    def do_PUT(self) -> None:
        path = urlsplit(self.path).path
        self.server.requests.append(f"PUT {path}")
        body = self._read("PUT")
        if body is None:
            return
        _, oid, *number = path.strip("/").split("/")
        if number:
            self.server.parts.setdefault(oid, {})[int(number[0])] = body
        elif hashlib.sha256(body).hexdigest() != oid:
            self._answer(400, {"error": "checksum"})
            return
        else:
            self.server.objects[oid] = body
        self._answer(200, {}, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'})

    def _create(self, asked: dict[str, Any]) -> None:
        repo = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] == "forbidden":
            self._answer(403, {"error": "no rights"})
            return
        known = repo in self.server.repos
        private = asked.get("visibility") == "private"
        self.server.repos.setdefault(
            repo, {"files": {}, "private": private, "sha": "0" * 40, "commits": []}
        )
        self._answer(409 if known else 200, {"url": f"{self.server.url}/{repo}", "name": repo})

    def _preupload(self, asked: dict[str, Any]) -> None:
        modes = [
            {
                "path": file["path"],
                "shouldIgnore": False,
                "oid": None,
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
            }
            for file in asked["files"]
        ]
        self._answer(200, {"files": modes})

    def _batch(self, asked: dict[str, Any]) -> None:
        objects = []
        for wanted in asked["objects"]:
            oid = wanted["oid"]
            size = wanted["size"]
            upload: dict[str, Any] = {"href": f"{self.server.url}/upload/{oid}", "header": {}}
            if size > PART_BYTES:
                count = -(-size // PART_BYTES)
                urls = {
                    f"{n:05d}": f"{self.server.url}/upload/{oid}/{n}" for n in range(1, count + 1)
                }
                upload = {
                    "href": f"{self.server.url}/complete/{oid}",
                    "header": {"chunk_size": str(PART_BYTES), **urls},
                }
            actions = {
                "upload": upload,
                "verify": {"href": f"{self.server.url}/verify", "header": {}},
            }
            objects.append(
                {"oid": oid, "size": size}
                | ({} if oid in self.server.objects else {"actions": actions})
            )
        self._answer(200, {"transfer": "multipart", "objects": objects})

    def _complete(self, oid: str, asked: dict[str, Any]) -> None:
        parts = self.server.parts.pop(oid, {})
        whole = b"".join(parts[part["partNumber"]] for part in asked["parts"])
        if hashlib.sha256(whole).hexdigest() != oid:
            self._answer(400, {"error": "checksum"})
            return
        self.server.objects[oid] = whole
        self._answer(200, {})

    def _commit(self, repo: str, body: bytes) -> None:
        stored = self.server.repos[repo]
        files = dict(stored["files"])
        for line in (json.loads(line) for line in body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        stored["files"], stored["sha"] = files, hashlib.sha1(body).hexdigest()
        stored["commits"].append(sorted(files))
        url = f"{self.server.url}/{repo}/commit/{stored['sha']}"
        self._answer(
            200, {"success": True, "commitOid": stored["sha"], "commitUrl": url, "hookOutput": ""}
        )

    def _is_known(self) -> bool:
        if self.server.refusing is not None:
            self._answer(self.server.refusing, {"error": "not now"})
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid credentials"})
        else:
            return True
        return False

    def _read(self, kind: str) -> bytes | None:
        """Return the body; None after cutting the connection in its middle."""
        length = int(self.headers.get("Content-Length", 0))
        if self.server.breaks[kind] <= 0:
            return self.rfile.read(length)
        self.server.breaks[kind] -= 1
        self.rfile.read(length // 2)
        # A reset, so that the client does not take it for an answer.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()
        return None

    def _answer(self, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def serving() -> Iterator[Hub]:
    """Yield a hub while the block runs."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
