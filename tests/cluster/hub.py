"""A model hub in a few lines: `python -m tests.cluster.hub FOLDER` serves a folder as the repository of any name.

It speaks what huggingface_hub asks for when it downloads a whole model, and prints each request.
"""

from __future__ import annotations

import hashlib
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PORT = 8000
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        files = sorted(file for file in FOLDER.iterdir() if file.is_file())
        headers = {"X-Repo-Commit": COMMIT}
        if path.startswith("/api/models/") and "/tree/" in path:
            listed = [
                {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": digest(f)}
                for f in files
            ]
            body = json.dumps(listed).encode()
        elif path.startswith("/api/models/"):
            siblings = [{"rfilename": file.name} for file in files]
            body = json.dumps(
                {"id": "org/tiny", "sha": COMMIT, "siblings": siblings, "private": False}
            ).encode()
        elif "/resolve/" in path and (FOLDER / path.rsplit("/", 1)[-1]).is_file():
            file = FOLDER / path.rsplit("/", 1)[-1]
            body, headers["ETag"] = file.read_bytes(), f'"{digest(file)}"'
        else:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", **headers}, with_body)
            return
        self._send(200, body, headers, with_body)

    def _send(self, code: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        print(self.command, self.path, code, flush=True)
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


if __name__ == "__main__":
    print("serving", flush=True)
    ThreadingHTTPServer(("", PORT), Hub).serve_forever()
