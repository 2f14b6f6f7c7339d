"""The network block that the other tests run under: it stops what would leave the machine, also in child processes."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import sys

import pytest

# 192.0.2.0/24 is reserved for documentation (RFC 5737): were the block broken, nobody would be reached.
CONNECT = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=1)"


def test_a_remote_connection_is_refused_in_this_process() -> None:
    with socket.socket() as client, pytest.raises(RuntimeError, match="this machine only"):
        client.connect(("192.0.2.1", 80))


def test_a_remote_connection_is_refused_in_a_child_process() -> None:
    child = subprocess.run([sys.executable, "-c", CONNECT], capture_output=True, text=True)
    assert child.returncode == 1
    assert "this machine only" in child.stderr


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_loopback_works(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection((host, port)) as client, server.accept()[0] as accepted:
            assert accepted.getpeername() == client.getsockname()


def test_the_users_caches_are_not_written_in_a_child_process() -> None:
    home = pwd.getpwuid(os.getuid()).pw_dir
    code = f"open({home + '/.cache/kubetune/speeds.jsonl'!r}, 'a')"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.returncode == 1
    assert "tests keep caches of their own" in child.stderr
