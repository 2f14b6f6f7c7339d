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
    path = f"{folder}/socket"
    listener = socket.socket(socket.AF_UNIX)
    config.add_cleanup(listener.close)
    listener.bind(path)
    listener.listen(len(specs))

    # The process that collects: `_main` of this file.
    words = [str(word) for word in config.invocation_params.args]
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.workers", str(listener.fileno()), json.dumps(words)],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        pass_fds=[listener.fileno()],
    )
    # `communicate` closes its standard input, at whose end it ends.
    config.add_cleanup(server.communicate)

    # What pytest-xdist starts for each worker, in place of `python -c`.
    command = shlex.join([sys.executable, "-ISc", HAND_OVER, path])
    specs_of_copies = []
    for spec in specs:
        specs_of_copies.append(type(spec)(f"popen//python={command}//id={spec.id}"))
    specs[:] = specs_of_copies


def _serve(listener: socket.socket) -> None:
    """Fork for each connection, until standard input ends; copies return."""
    while select.select([listener, sys.stdin], [], [])[0] == [listener]:
        # HAND_OVER sends its standard input, output and error. It waits until the socket is closed.
        to, _ = listener.accept()
        _, pipes, _, _ = socket.recv_fds(to, 1, 3)
        if os.fork() == 0:
            # The copy: it becomes the worker, with the pipes as its own.
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
    # The objects that this process had are those of its parent, which collected.
    sys.stdin = open(0, "r", closefd=False)  # noqa: SIM115, UP015
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    sys.argv = ["-c"]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    # execnet's first line of code, which reads the rest from standard input.
    exec("import sys;exec(eval(sys.stdin.readline()))", vars(main))


def _main(descriptor: str, arguments: str) -> None:
    listener = socket.socket(fileno=int(descriptor))
    listener.set_inheritable(False)

    # It collects in silence: workers say what cannot be collected.
    stdout = os.dup(1)
    stderr = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    words = [*json.loads(arguments), "--collect-only", "-qq", "--numprocesses=0"]
    # Nothing is tested here, so nobody looks through all that was imported for what was thrown away, twice.
    words += ["-p", "no:unraisableexception"]
    pytest.main(words)
    importlib.import_module("tests.warm")
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)

    # Copies share memory with this process as long as the collector does not write into its objects.
    gc.freeze()
    _serve(listener)


if __name__ == "__main__":
    _main(*sys.argv[1:])
