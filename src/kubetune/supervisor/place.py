"""This node's place in a run: which node of how many, with how many ranks, and the lock that lets one agent have it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kubetune import errors
from kubetune.base import locks
from kubetune.base.files import require_plain
from kubetune.config.naming import OF_TRACKERS
from kubetune.rundir import metrics

if TYPE_CHECKING:
    import psutil

    from kubetune.plan.plan import Plan

_DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Place:
    """A node's place in a run."""

    nodes: int  # nodes of the run
    processes: int  # ranks on each node
    node: int = 0  # which node this is
    master_addr: str = "127.0.0.1"  # of node 0
    master_port: int = _DEFAULT_PORT

    @property
    def ranks(self) -> range:
        """Return the ranks that run on this node."""
        first = self.node * self.processes
        return range(first, first + self.processes)


def find_place(
    nodes: int, processes: int, environ: Mapping[str, str], *, origin: str = "compute.nodes"
) -> Place:
    """Return this node's place in a run, by the variables that operators and people set.

    `origin`: the key that the number of nodes comes from, for messages. Raise ConfigError naming every
    variable that is missing or does not fit.
    """
    # Stray variables of a cluster must not matter to a run on one node.
    if nodes == 1:
        return Place(1, processes)

    problems = []
    number = _first(environ, "PET_NODE_RANK", "NODE_RANK", "JOB_COMPLETION_INDEX", "GROUP_RANK")
    if number is None or not number.isdecimal() or int(number) >= nodes:
        value = "is not set" if number is None else f"is {number!r}"
        problems.append(
            f"NODE_RANK (or PET_NODE_RANK, JOB_COMPLETION_INDEX) {value}; expected 0 to {nodes - 1}"
        )

    address = _first(environ, "PET_MASTER_ADDR", "MASTER_ADDR")
    if not address:
        problems.append(
            "MASTER_ADDR (or PET_MASTER_ADDR) is not set; expected the host name of node 0"
        )

    port = _first(environ, "PET_MASTER_PORT", "MASTER_PORT") or str(_DEFAULT_PORT)
    if not port.isdecimal() or not 0 < int(port) < 65536:
        problems.append(f"MASTER_PORT (or PET_MASTER_PORT) is {port!r}; expected a port number")

    # Operators write a range for elastic runs, 4:4 for four nodes.
    expected = _first(environ, "PET_NNODES") or str(nodes)
    if expected not in (str(nodes), f"{nodes}:{nodes}"):
        problems.append(f"PET_NNODES is {expected!r}, but {origin} is {nodes}; they must agree")

    if problems:
        raise errors.ConfigError([f"{origin} is {nodes}, but {problem}" for problem in problems])
    return Place(nodes, processes, int(number or 0), address or "", int(port))


def read_place(run_dir: Path) -> Place:
    """Return this node's place in a run. Raise ConfigError as `find_place` does, or for no run directory."""
    plan = read_plan(run_dir)
    return find_place(plan.nodes, plan.processes_per_node, os.environ)


def hold(run_dir: Path, node: int) -> AbstractContextManager[None]:
    """Return the lock that keeps a second agent of the same node out.

    Raise EnvironmentFault naming its holder, or naming a link in the run directory: what is written
    through one lands elsewhere.
    """
    require_plain(run_dir, but=OF_TRACKERS)
    # One lock for each node, since the pods of a run share the directory.
    return locks.lock(run_dir / "logs" / f"node-{node}.lock", wait=False)


def holders(run_dir: Path) -> list[psutil.Process]:
    """Return the processes of this machine that hold a node of the run."""
    processes = []
    for path in sorted((run_dir / "logs").glob("node-*.lock")):
        process = locks.holder(path)
        if process is not None:
            processes.append(process)
    return processes


def read_plan(run_dir: Path) -> Plan:
    """Return the plan of a run directory. Raise ConfigError if it has none."""
    # Imported late: it takes so long that the signal handlers must be there before.
    from kubetune.plan.plan import Plan

    try:
        return Plan.read(run_dir / metrics.PLAN)
    except FileNotFoundError as error:
        raise errors.ConfigError(
            f"{error.filename} is missing; expected a run directory made by kubetune"
        ) from None


def _first(environ: Mapping[str, str], *names: str) -> str | None:
    for name in names:
        if environ.get(name):
            return environ[name]
    return None
