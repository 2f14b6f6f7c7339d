"""The environment variables that ranks are started with."""

from __future__ import annotations

import os

from kubetune.base import logs, processes

# Names the start of all nodes that a rank belongs to. A rank that finds another start's board ends.
START_ID = "KUBETUNE_START_ID"
# Number of the ranks that trained, for a rank that ends their run alone.
RANKS = "KUBETUNE_RANKS"

# Variables that torchrun would set, for a rank that is started without it.
ONLY_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
# How often a thread that waits for the others of a product looks before it sleeps, some 0.1 ms. GNU's
# OpenMP looks 300,000 times: where others use the machine too, most of a core goes into waiting.
SPINS = 10_000


def environment(ranks: int = 1) -> dict[str, str]:
    """Return this process's environment for so many ranks on this node, which share its cores."""
    # torchrun would take what operators set for it as defaults; everything it needs is in its arguments.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    cores = processes.usable_cores()
    if ranks > 1 or cores < (os.cpu_count() or 1):
        environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", str(SPINS))
    environ.setdefault(processes.COMMAND, logs.scrub(processes.command_line()))
    return environ
