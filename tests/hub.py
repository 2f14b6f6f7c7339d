"""A stand-in for the hub on the loopback: models and data sets of Parquet files, asked by the real client libraries.

It speaks as much of the hub's protocol as these need to load one: facts of a repository, its tree, and its files.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = hashlib.sha1(b"the only commit").hexdigest()


@contextmanager
def serving(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[str]:
    """Yield the address of a hub with these: `{"owner/model": {path: content}, "datasets/owner/name": {path: content}}`."""

    class Hub(Connection):
        held = repositories

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Connection(BaseHTTPRequestHandler):
    held: Mapping[str, Mapping[str, bytes]] = {}

    def do_GET(self) -> None:
        """`/api/KIND/OWNER/NAME/QUESTION` and `/REPOSITORY/resolve/REVISION/PATH`."""
        name, asked = self._split()
        files = self.held.get(name)
        if files is None:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif asked[:1] == ["resolve"]:
            self._send_file(files, "/".join(asked[2:]))
        else:
            self._tell(name, files, asked)

    do_HEAD = do_GET

    def _split(self) -> tuple[str, list[str]]:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[0] == "api":
            return "/".join(
                [*(["datasets"] if parts[1] == "datasets" else []), *parts[2:4]]
            ), parts[4:]
        end = 3 if parts[0] == "datasets" else 2
        return "/".join(parts[:end]), parts[end:]

    def _tell(self, name: str, files: Mapping[str, bytes], asked: list[str]) -> None:
        if asked and asked[0] == "tree" and "recursive=true" in self.path.lower():
            self._answer(200, _json([_entry(path, content) for path, content in files.items()]))
            return
        if asked and asked[0] == "tree":
            self._answer(200, _json(_listing(files, "".join(f"{part}/" for part in asked[2:]))))
            return
        siblings = [{"rfilename": path} for path in files]
        counts = dict.fromkeys(("downloads", "likes"), 0)
        flags = dict.fromkeys(("private", "gated", "disabled"), False)
        facts = {
            "id": name.removeprefix("datasets/"),
            "sha": COMMIT,
            "tags": [],
            "siblings": siblings,
        }
        facts |= counts | flags
        self._answer(200, _json(facts))

    def _send_file(self, files: Mapping[str, bytes], path: str) -> None:
        if path not in files:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        etag = hashlib.sha256(files[path]).hexdigest()
        self._answer(
            200,
            files[path],
            {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"},
        )

    def _answer(
        self, status: int, content: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self._send(content)

    def _send(self, content: bytes) -> None:
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def _listing(files: Mapping[str, bytes], folder: str) -> list[dict[str, object]]:
    """Return what lies right in a folder, which is "" or ends with a slash: folders by their name, and files."""
    inside = {path: path.removeprefix(folder) for path in files if path.startswith(folder)}
    folders = {f"{folder}{rest.partition('/')[0]}" for rest in inside.values() if "/" in rest}
    plain = [_entry(path, files[path]) for path, rest in inside.items() if "/" not in rest]
    return [
        *(
            {"type": "directory", "path": path, "oid": COMMIT, "size": 0}
            for path in sorted(folders)
        ),
        *plain,
    ]


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _entry(path: str, content: bytes) -> dict[str, object]:
    return {
        "type": "file",
        "path": path,
        "size": len(content),
        "oid": hashlib.sha1(content).hexdigest(),
    }
