"""Real ranks in about a second: processes forked from a copy of this one, which has imported torch and transformers.

    norms = run_ranks(gradient_norm, 2, run_dir)       # gradient_norm(world, run_dir) on two ranks joined by gloo

Each rank is a process of its own with torchrun's variables, so signals, deaths and collectives are the real ones.
"""

from __future__ import annotations

import gc
import importlib
import logging
import multiprocessing
import os
import pickle
import random
import select
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any, NoReturn
from unittest.mock import patch

# Longer than anything started here takes, even on a crowded machine.
SECONDS = 120.0

_CONTEXT = multiprocessing.get_context("forkserver")


def start_server() -> None:
    """Make the server that ranks are forked from: a copy of this process, which need not import everything again.

    To be called before the first test, so that no rank inherits what a test has changed.
    """
    resource_tracker.ensure_running()
    with patch.object(util, "spawnv_passfds", _fork):
        forkserver.ensure_running()


def _fork(path: object, args: object, descriptors: list[int]) -> int:
    """Fork a process that serves ranks, in place of the start of a new interpreter, and return its id."""
    pid = os.fork()
    if pid == 0:
        _serve(*descriptors)
    return pid


def _serve(listener: int, alive: int, *key: int) -> NoReturn:
    """Serve until the tests have ended; nothing that pytest has put into this process counts any more.

    `key` is a pipe with the key of who may ask, from Python 3.14 on.
    """
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and descriptor not in (listener, alive, *key, nowhere):
                # Not closed: a number that is given out anew could still be written to by who had it before.
                os.dup2(nowhere, descriptor, inheritable=False)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
        importlib.reload(warnings)  # filters, and where warnings go
        for handler in [*logging.getLogger().handlers]:
            logging.getLogger().removeHandler(handler)
        options: Any = {}
        if key:
            options["authkey_r"] = key[0]
        forkserver.main(listener, alive, [], **options)
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def free_port() -> int:
    """Return a port of the loopback that nobody listens on, below those that the kernel gives to outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(
            12_000, 32_000
        )  # pytest gives every process the same other random one
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def started(
    target: Callable[..., object],
    world_size: int,
    *args: Any,
    environ: Mapping[str, str] | None = None,
) -> Iterator[list[ForkServerProcess]]:
    """Run `target(*args)` as ranks 0, 1, …; an int it returns is the exit code. They are killed when the block is left."""
    meeting = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
    }
    processes = []
    for rank in range(world_size):
        variables = {**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank), **(environ or {})}
        processes.append(_CONTEXT.Process(target=_enter, args=(variables, target, args)))
    try:
        for process in processes:
            process.start()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def wait_all(processes: list[ForkServerProcess], seconds: float = SECONDS) -> list[int]:
    """Return the exit codes of ranks that should end by themselves, negative for the signal that ended one."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    assert None not in codes, f"rank {codes.index(None)} still runs after {seconds} s"
    return [code for code in codes if code is not None]


def wait_until(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """Look again and again; for what a process does at a moment of its own choice."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        select.select([], [], [], 0.01)


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Return what `function(world, *args)` returns on each rank; a rank's error is raised here with its traceback."""
    pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(world_size)]
    writers = [writer for _, writer in pipes]
    results: dict[int, Any] = {}
    with started(_tell, world_size, writers, function, args):
        readers = {reader: rank for rank, (reader, _) in enumerate(pipes)}
        for writer in writers:
            writer.close()  # so that a rank that dies is an end of file here
        while readers:
            answered = wait(list(readers), SECONDS)
            assert answered, f"ranks {sorted(readers.values())} did not answer in {SECONDS} s"
            for reader in answered:
                assert isinstance(reader, Connection)
                rank = readers.pop(reader)
                results[rank], failure = pickle.loads(reader.recv_bytes())
                assert failure is None, f"rank {rank}: {failure}"
    return [results[rank] for rank in range(world_size)]


def _enter(
    variables: Mapping[str, str], target: Callable[..., object], args: tuple[Any, ...]
) -> None:
    os.environ.update(variables)
    gc.set_threshold(700, 10, 10)  # as in a process that users start
    code = target(*args)
    if isinstance(code, int):
        raise SystemExit(code)


def _tell(writers: list[Connection], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    from kubetune.distributed import process_group

    rank = int(os.environ["RANK"])
    for other in writers[:rank] + writers[rank + 1 :]:
        other.close()
    try:
        with process_group.join(timeout_seconds=SECONDS / 2) as world:
            # With what tensors hold: a pipe would be sent where to get it, from a rank that may be gone by then.
            writers[rank].send_bytes(pickle.dumps((function(world, *args), None)))
    except Exception:
        writers[rank].send_bytes(pickle.dumps((None, traceback.format_exc())))
