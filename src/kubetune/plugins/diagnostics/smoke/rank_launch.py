"""Start the ranks of the smoke test, and wait for them: are ranks, links, devices and volumes fit for a run?

    kubetune smoke --processes 2                     here
    kubetune smoke --nodes 4 --processes 8           in a pod of each node; rank and master as for a run
    torchrun --nproc-per-node 8 … -m kubetune smoke  as one rank among those that torchrun started

What a rank does is in checks.py; this file imports no torch.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

from kubetune import errors
from kubetune.base import processes
from kubetune.base.gpus import visible_gpus
from kubetune.plugins.diagnostics.smoke.settings import Settings
from kubetune.supervisor.place import Place, find_place

_LOOK_SECONDS = 0.1
_LAST_WORD_SECONDS = 5.0


def run(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> int:
    """Be a rank where somebody has made this process one, else start the ranks of this node; return the exit code.

    Raise ConfigError when no variable says which of several nodes this is.
    """
    if threading.current_thread() is threading.main_thread():
        # There is nothing to save. Without a handler process 1 of a container does not get the signal at all.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(errors.PREEMPTED))
    # Operators set RANK for a node, torchrun sets LOCAL_RANK too; without --processes a node is one rank.
    if "LOCAL_RANK" in environ or ("RANK" in environ and args.processes is None):
        # Read when torch is loaded. Lost ranks are explained here, and not by stacks of C++ functions.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        # Else NCCL ends the process when a collective times out, and nobody says which rank was missing.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        from kubetune.plugins.diagnostics.smoke.checks import run_rank

        return run_rank(Settings.of(args))
    count = args.processes or visible_gpus(environ) or 1
    place = find_place(args.nodes, count, environ, origin="the number of nodes")
    return launch(place, environ, args.timeout)


def launch(place: Place, environ: Mapping[str, str], timeout_seconds: float) -> int:
    """Start this node's ranks and wait for them; return the exit code.

    torchrun would wait for missing nodes without a message, so the ranks meet without it.
    """
    port = place.master_port
    if place.nodes == 1:
        # Other runs of this machine may use the usual one.
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
    common = {
        "OMP_NUM_THREADS": str(max(1, processes.usable_cores() // place.processes)),
        **environ,
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(place.nodes * place.processes),
        "LOCAL_WORLD_SIZE": str(place.processes),
    }
    # Each rank has this command line too, and variables that say which rank it is.
    command = processes.module("kubetune", *sys.argv[1:])
    children = {}
    for local_rank, rank in enumerate(place.ranks):
        variables = {**common, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        children[rank] = subprocess.Popen(
            command,
            env=processes.shielded(variables),
            # Ctrl-C must reach this process only: each rank would print its stack.
            start_new_session=True,
            preexec_fn=processes.die_with_parent,
        )
    try:
        _wait(children, timeout_seconds)
    finally:
        for child in children.values():
            child.kill()
            child.wait()

    # The smallest code says most: a bug's, then the user's, then the environment's, such as of killed ranks.
    codes = []
    for rank, child in children.items():
        if child.returncode < 0:
            name = signal.Signals(-child.returncode).name
            print(f"kubetune: rank {rank} was killed by {name}", file=sys.stderr)
            codes.append(errors.ENVIRONMENT)
        elif child.returncode > 0:
            codes.append(child.returncode)
    return min(codes, default=errors.OK)


def _wait(children: Mapping[int, subprocess.Popen[bytes]], timeout_seconds: float) -> None:
    """Wait for all ranks, but not for one that hangs when another has failed and the rest has had time to notice."""
    waiting = dict(children)
    deadline = math.inf
    while waiting and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        waiting = {rank: child for rank, child in waiting.items() if child.poll() is None}
        if any(child.returncode for child in children.values()):
            # The others notice within their timeout, and rank 0, which names the lost ones, may wait as long again.
            patience = 2 * timeout_seconds + 10
            if 0 in children and 0 not in waiting:
                patience = _LAST_WORD_SECONDS
            deadline = min(deadline, time.monotonic() + patience)
    for rank in waiting:
        message = f"rank {rank} hangs, and is ended because another one has failed"
        print(f"kubetune: {message}", file=sys.stderr)
