"""A hub on the loopback, as much of it as the real client libraries ask for: data sets' files, whole or in ranges."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0" * 39 + "1"


@contextmanager
def serving(repos: Mapping[str, Path]) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Serve folders as data sets; yields the environment that leads there, and the paths asked for, as they come."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_POST(self) -> None:
            wanted = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._answer(body=True, wanted=wanted)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, *, body: bool, wanted: bytes = b"") -> None:
            path, recursive = unquote(urlsplit(self.path).path), "recursive=true" in self.path.lower()
            asked.append(f"{self.command} {path}")
            for name, folder in repos.items():
                if found := re.fullmatch(rf"/api/datasets/{name}(?:/([a-z-]+)/[^/]+(?:/(.*))?)?", path):
                    return self._send_json(*_facts(folder, name, found[1], found[2] or "", wanted, recursive), body)
                if found := re.fullmatch(rf"/datasets/{name}/resolve/[^/]+/(.+)", path):
                    return self._send_file(folder / found[1], body)
            return self._send_json(404, {"error": "not found"}, body)

        def _send_json(self, status: int, value: Any, body: bool) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            if status == 404:
                self.send_header("X-Error-Code", "EntryNotFound" if "resolve" in self.path else "RepoNotFound")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

        def _send_file(self, file: Path, body: bool) -> None:
            if not file.is_file():
                return self._send_json(404, {"error": "not found"}, body)
            content = file.read_bytes()
            begin, end = 0, len(content)
            if span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                begin, end = int(span[1]), min(end, int(span[2] or end) + 1)
            self.send_response(206 if span else 200)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Accept-Ranges", "bytes")
            if span:
                self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
            self.send_header("Content-Length", str(end - begin))
            self.end_headers()
            if body:
                self.wfile.write(content[begin:end])
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0"}, asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _facts(folder: Path, name: str, kind: str | None, below: str, wanted: bytes, recursive: bool) -> tuple[int, Any]:
    """What the API says of a data set: itself (`revision` or nothing), its `tree`, or `paths-info`."""
    files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    if kind in (None, "revision"):
        siblings = [{"rfilename": file} for file in files]
        return 200, {"id": name, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}
    if kind == "paths-info":
        asked = set(json.loads(wanted)["paths"])
        return 200, [_entry(folder, file) for file in files if file in asked]
    inside = [file for file in files if not below or file.startswith(f"{below}/")]
    above = {str(parent) for file in inside for parent in Path(file).parents if str(parent) not in (".", below)}
    folders = [{"type": "directory", "path": path, "size": 0, "oid": "0" * 40} for path in sorted(above)]
    entries = [*folders, *(_entry(folder, file) for file in inside)]
    if not recursive:
        entries = [entry for entry in entries if str(Path(entry["path"]).parent) == (below or ".")]
    return (200, entries) if inside else (404, {"error": "not found"})


def _entry(folder: Path, file: str) -> dict[str, Any]:
    content = (folder / file).read_bytes()
    return {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
