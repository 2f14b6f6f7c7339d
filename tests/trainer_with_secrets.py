"""A process that stands for a trainer: it has a secret in its environment, and asks the reward function of probes.py.

    python -m tests.trainer_with_secrets FOLDER bounded|refused|unbounded

Prints JSON: the tries that succeeded, and the bounds that the kernel refuses. `refused`: as in a container whose runtime
allows no namespaces. `unbounded`: the function runs in a process without any bounds, to show that each try can succeed.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kubetune.config.schema import GrpoConfig, RewardConfig
from kubetune.scoring.rewards.pool import RewardPool
from kubetune.scoring.rewards.request import Request
from tests import probes

MARK = "KUBETUNE_TEST_MARK_OF_THE_TRAINER"
_KEY = 0x6B75
_LIBC = ctypes.CDLL(None, use_errno=True)


def refuse_namespaces() -> None:
    """Refuse `unshare` to this process and its children, as the default profile of container runtimes does."""
    number = {"x86_64": 272, "aarch64": 97}[os.uname().machine]
    program = b"".join(
        struct.pack("=HBBI", *instruction)
        for instruction in (
            (0x20, 0, 0, 0),
            (0x15, 0, 1, number),
            (0x06, 0, 0, 0x00050000 | errno.EPERM),
            (0x06, 0, 0, 0x7FFF0000),
        )
    )
    buffer = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    assert _LIBC.prctl(38, 1, 0, 0, 0) == 0
    assert _LIBC.prctl(22, 2, head, 0, 0) == 0


def target(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Make all that the function tries to reach."""
    file = folder / "file"
    file.write_text("content")
    stack.enter_context(file.open())
    os.mkfifo(folder / "fifo")
    # Somebody reads it, so that it can be opened for writing at once.
    os.open(folder / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    shared = Path("/dev/shm") / f"kubetune-test-{os.getpid()}"
    shared.write_text("content")
    stack.callback(shared.unlink)
    listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    udp = stack.enter_context(socket.socket(type=socket.SOCK_DGRAM))
    udp.bind(("127.0.0.1", 0))
    for name in ("socket", "datagrams", "abstract"):
        kind = socket.SOCK_DGRAM if name == "datagrams" else socket.SOCK_STREAM
        server = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
        server.bind(f"\0{folder}" if name == "abstract" else str(folder / name))
        if kind == socket.SOCK_STREAM:
            server.listen()
    _, terminal = pty.openpty()
    key = _KEY << 16 | os.getpid() & 0xFFFF
    segment = _LIBC.shmget(key, 4096, 0o1600)
    assert segment != -1
    stack.callback(_LIBC.shmctl, segment, 0, None)
    number = ctypes.create_string_buffer(b"secret00")
    stack.callback(number.raw.strip)  # it lives as long as the rest
    return {
        "pid": os.getpid(),
        "mark": MARK,
        "file": str(file),
        "fifo": str(folder / "fifo"),
        "shared": str(shared),
        "port": listening.getsockname()[1],
        "udp": udp.getsockname()[1],
        "socket": str(folder / "socket"),
        "datagrams": str(folder / "datagrams"),
        "abstract": str(folder),
        "terminal": os.ttyname(terminal),
        "address": ctypes.addressof(number),
        "key": key,
        "host": socket.gethostname(),
    }


def request_of(texts: list[str]) -> Request:
    return Request("", {}, [None], texts, [[] for _ in texts])


def bounded(texts: list[str]) -> tuple[list[float | None], list[str]]:
    """Return what the function says in a reward process, and the bounds that the kernel refuses."""
    reward = RewardConfig(file=probes.__file__, function="look")
    pool = RewardPool([reward], GrpoConfig())
    kept = os.dup(pool.process.replies)
    try:
        [judgement] = pool.judge(request_of(texts))
    finally:
        pool.close()
    assert not judgement.error, judgement.error
    values = list(judgement.rewards)
    # The pipe hangs up when the last process that holds its other end has gone.
    poll = select.poll()
    poll.register(kept, 0)
    seconds = 0 if "namespaces" in pool.refused else 30
    if poll.poll(seconds * 1000):
        values[list(probes.TRIES).index("keep_process")] = 0.0
    return values, pool.refused


def unbounded(texts: list[str]) -> list[float]:
    # A process that outlives its parent would be waited for here.
    texts = [text for text in texts if "keep_process" not in text]
    program = "import json, sys; from tests import probes; print(probes.look(json.load(sys.stdin)))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, input=json.dumps(texts), stdout=subprocess.PIPE, text=True, check=True
    )
    values: list[float] = json.loads(done.stdout)
    values.insert(list(probes.TRIES).index("keep_process"), 0.0)
    return values


def main() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO)
    folder = Path(sys.argv[1])
    if sys.argv[2] == "refused":
        refuse_namespaces()
    with ExitStack() as stack:
        facts = target(folder, stack)
        texts = [json.dumps({**facts, "try": name}) for name in probes.TRIES]
        refused: list[str] = []
        values: list[Any]
        if sys.argv[2] == "unbounded":
            values = unbounded(texts)
        else:
            values, refused = bounded(texts)
    succeeded = [name for name, value in zip(probes.TRIES, values, strict=True) if value]
    print(json.dumps({"succeeded": succeeded, "refused": refused}))


if __name__ == "__main__":
    main()
