"""Workers of pytest-xdist as copies of one process that has collected the tests, and so imported everything, once.

pytest-xdist would start an interpreter for each, which takes twenty seconds of a processor until its first test runs.
Here it starts HAND_OVER instead, a moment's program that gives its pipes to the process that has collected: this forks,
and the copy does what the new interpreter would have done.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import pytest

# Program that waits for the end of the copy that has its pipes.
HAND_OVER = """
import socket, sys
to = socket.socket(socket.AF_UNIX)
to.connect(sys.argv[1])
socket.send_fds(to, [b"."], [0, 1, 2])
to.recv(1)
"""


def fork(config: pytest.Config, specs: list[Any]) -> None:
    """Let the workers of `specs` be copies of a process that begins to collect now, with this one's arguments."""
    folder = tempfile.mkdtemp()
    config.add_cleanup(lambda: shutil.rmtree(folder))
    listener = socket.socket(socket.AF_UNIX)
    config.add_cleanup(listener.close)
    listener.bind(path := f"{folder}/socket")
    listener.listen(len(specs))
    arguments = [
        str(listener.fileno()),
        json.dumps([str(word) for word in config.invocation_params.args]),
    ]
    begun = subprocess.Popen(
        [sys.executable, "-m", "tests.workers", *arguments],
        cwd=Path(__file__).parents[1], stdin=subprocess.PIPE, pass_fds=[listener.fileno()],
    )  # fmt: skip
    config.add_cleanup(begun.communicate)  # the end of its standard input is its own
    command = shlex.join([sys.executable, "-ISc", HAND_OVER, path])
    specs[:] = [type(spec)(f"popen//python={command}//id={spec.id}") for spec in specs]


def _serve(listener: socket.socket) -> None:
    """Fork for each connection, until standard input ends; copies return."""
    while select.select([listener, sys.stdin], [], [])[0] == [listener]:
        to, _ = listener.accept()
        _, pipes, _, _ = socket.recv_fds(to, 1, 3)
        if os.fork() == 0:
            listener.close()
            for number, pipe in enumerate(pipes):
                os.dup2(pipe, number)
                os.close(pipe)
            return _work()
        to.close()
        for pipe in pipes:
            os.close(pipe)
    return None


def _work() -> None:
    """Do as `python -c` does with what execnet lets a new interpreter do; the socket closes when it has ended."""
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, closefd=False)  # noqa: SIM115
        for number, mode in enumerate("rww")
    )
    sys.argv = ["-c"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec("import sys;exec(eval(sys.stdin.readline()))", vars(sys.modules["__main__"]))


def _main(descriptor: str, arguments: str) -> None:
    listener = socket.socket(fileno=int(descriptor))
    listener.set_inheritable(False)
    kept = (os.dup(1), os.dup(2))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)  # workers say what cannot be collected
    # Nothing is tested here, so nobody looks through all that was imported for what was thrown away, twice.
    pytest.main(
        [
            *json.loads(arguments),
            "--collect-only",
            "-qq",
            "--numprocesses=0",
            "-p",
            "no:unraisableexception",
        ]
    )
    importlib.import_module("tests.warm")
    for number, pipe in enumerate(kept, 1):
        os.dup2(pipe, number)
    gc.freeze()
    _serve(listener)


if __name__ == "__main__":
    _main(*sys.argv[1:])
