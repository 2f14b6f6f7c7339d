"""An S3 server on this machine for tests: moto's, in a process of its own, and what makes clients speak to it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from tests.ranks import free_port, wait_until

BUCKET = "runs"


@dataclass
class Store:
    """A server that can be frozen, as if the network were gone; its address stays."""

    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environ(self) -> dict[str, str]:
        """Return what S3 clients look for."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }

    def start(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until(self._answers)
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/{BUCKET}", method="PUT")).close()

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def freeze(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Stop the store, with which all its content is lost."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@contextmanager
def serving() -> Iterator[Store]:
    """Yield a store with an empty bucket while the block runs; this process and its children use it."""
    store = Store()
    before = dict(os.environ)
    os.environ.update(store.environ)
    try:
        store.start()
        yield store
    finally:
        store.stop()
        os.environ.clear()
        os.environ.update(before)
