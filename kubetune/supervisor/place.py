"""This node's place in a run: which node of how many, with how many ranks, and the lock that lets one agent have it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kubetune import errors
from kubetune.base import files
from kubetune.base.files import require_plain
from kubetune.config.naming import OF_TRACKERS
from kubetune.rundir import metrics

if TYPE_CHECKING:
    import psutil

    from kubetune.plan.plan import Plan

_DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Place:
    """A node's place in a run: `node` of `nodes`, with `processes` ranks on each."""

    nodes: int
    processes: int
    node: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = _DEFAULT_PORT

    @property
    def ranks(self) -> range:
        """The ranks that run on this node."""
        return range(self.node * self.processes, (self.node + 1) * self.processes)


def find_place(
    nodes: int, processes: int, environ: Mapping[str, str], *, said_by: str = "compute.nodes"
) -> Place:
    """This node's place in a run of `nodes` × `processes` ranks, by the variables that operators and people set.

    `said_by`: what gave the number of nodes, for messages. Raises ConfigError naming every variable that is missing or
    does not fit.
    """
    if nodes == 1:
        return Place(1, processes)
    problems = []
    number = _first(environ, "PET_NODE_RANK", "NODE_RANK", "JOB_COMPLETION_INDEX", "GROUP_RANK")
    if number is None or not number.isdecimal() or int(number) >= nodes:
        found = "is not set" if number is None else f"is {number!r}"
        problems.append(
            f"NODE_RANK (or PET_NODE_RANK, JOB_COMPLETION_INDEX) {found}; expected 0 to {nodes - 1}"
        )
    address = _first(environ, "PET_MASTER_ADDR", "MASTER_ADDR")
    if not address:
        problems.append(
            "MASTER_ADDR (or PET_MASTER_ADDR) is not set; expected the host name of node 0"
        )
    port = _first(environ, "PET_MASTER_PORT", "MASTER_PORT") or str(_DEFAULT_PORT)
    if not port.isdecimal() or not 0 < int(port) < 65536:
        problems.append(f"MASTER_PORT (or PET_MASTER_PORT) is {port!r}; expected a port number")
    expected = _first(environ, "PET_NNODES") or str(nodes)
    if expected not in (str(nodes), f"{nodes}:{nodes}"):
        problems.append(f"PET_NNODES is {expected!r}, but {said_by} is {nodes}; they must agree")
    if problems:
        raise errors.ConfigError([f"{said_by} is {nodes}, but {problem}" for problem in problems])
    return Place(nodes, processes, int(number or 0), address or "", int(port))


def read_place(run_dir: Path) -> Place:
    """This node's place in the run of `run_dir`. Raises ConfigError as `find_place` does, or when it is none."""
    plan = read_plan(run_dir)
    return find_place(plan.nodes, plan.processes_per_node, os.environ)


def hold(run_dir: Path, node: int) -> AbstractContextManager[None]:
    """The lock that keeps a second agent of the same node out; raises EnvironmentFault naming its holder.

    Or what in the run directory is no file inside it: whatever is written through a link lands elsewhere.
    """
    require_plain(run_dir, but=OF_TRACKERS)
    return files.lock(run_dir / "logs" / f"node-{node}.lock", wait=False)


def holders(run_dir: Path) -> list[psutil.Process]:
    """Processes of this machine that hold a node of the run."""
    paths = sorted((run_dir / "logs").glob("node-*.lock"))
    return [found for path in paths if (found := files.holder(path)) is not None]


def read_plan(run_dir: Path) -> Plan:
    """The plan of a run directory. Raises ConfigError where it has none."""
    from kubetune.plan.plan import (
        Plan,
    )  # takes long enough that the signal handlers must come first

    try:
        return Plan.read(run_dir / metrics.PLAN)
    except FileNotFoundError as error:
        raise errors.ConfigError(
            f"{error.filename} is missing; expected a run directory made by kubetune"
        ) from None


def _first(environ: Mapping[str, str], *names: str) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)
