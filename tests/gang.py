"""Runs of several nodes on this machine: the real agent of each node, started again as a cluster does it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

from kubetune import errors
from tests import toy
from tests.ranks import free_port, wait_until

# "one by one": a Job or StatefulSet replaces each pod that has ended. "together": a JobSet replaces all of them.
Restarts = Literal["one by one", "together"]

# Until a run of the toy has ended, on a crowded machine. `training.timeout_seconds` has to be far above it.
SECONDS = 240.0


class Gang:
    """The nodes of one run, each with an agent that is a process of its own. A context manager, which kills them."""

    def __init__(self, run_dir: Path, nodes: int, restarts: Restarts = "one by one") -> None:
        self.run_dir = run_dir
        self.restarts = restarts
        self.starts = [0] * nodes  # of each node
        self.codes: list[list[int]] = [[] for _ in range(nodes)]  # how each start ended
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self._nodes = nodes
        self._port = free_port()

    def __enter__(self) -> Gang:
        return self

    def __exit__(self, *error: object) -> None:
        for agent in self._agents.values():
            agent.kill()
            agent.wait()

    def command(self, node: int) -> list[str]:
        """Return the command of a node's agent."""
        return [sys.executable, "-P", "-m", "kubetune.agent", str(self.run_dir)]

    def address(self) -> str:
        """Return where node 0 is found."""
        return "127.0.0.1"

    def start(self, node: int, environ: Mapping[str, str] | None = None) -> None:
        """Start the agent of a node."""
        variables = {
            **os.environ,
            "NODE_RANK": str(node),
            "MASTER_ADDR": self.address(),
            "MASTER_PORT": str(self._port),
            "OMP_NUM_THREADS": "1",
            **(environ or {}),
        }
        self.starts[node] += 1
        with open(self.run_dir / f"agent-{node}.txt", "ab") as output:
            self._agents[node] = subprocess.Popen(
                self.command(node), env=variables, stdout=output, stderr=output
            )

    def start_all(self, environs: Mapping[int, Mapping[str, str]] | None = None) -> None:
        """Start the agents of all nodes, with these variables more."""
        for node in range(self._nodes):
            self.start(node, (environs or {}).get(node))

    def pid(self, node: int) -> int:
        """Return the process of a node's agent."""
        return self._agents[node].pid

    def wait_until_stopped(self, node: int) -> None:
        """Wait until the agent or a process below it has stopped itself, as its fault says."""

        def is_there() -> bool:
            agent = self._agents[node]
            assert agent.poll() is None, f"ended with {agent.returncode}: {self.printed(node)}"
            return toy.is_stopped(agent.pid) or bool(toy.stopped_below(agent.pid))

        wait_until(is_there, SECONDS)

    def replace(self, node: int) -> None:
        """Replace the pod of a node as a drain or a kill does: all its processes die, and a new agent begins."""
        self._agents[node].kill()
        self._agents[node].wait()
        if self.restarts == "together":
            self._restart_all()
        else:
            self.start(node)

    def _restart_all(self) -> None:
        for agent in self._agents.values():
            agent.terminate()
        for node, agent in self._agents.items():
            self.codes[node].append(agent.wait(SECONDS))
        self.start_all()

    def run_to_end(self, seconds: float = SECONDS) -> None:
        """Start again whatever ends with a code that asks for it, until all nodes have ended with 0."""
        deadline = time.monotonic() + seconds
        while self._agents:
            node = self._next_to_end(deadline)
            agent = self._agents.pop(node)
            code = agent.returncode
            self.codes[node].append(code)
            if code == errors.OK:
                continue
            assert code >= 128 or code < 0, f"node {node} ended with {code}: {self.printed(node)}"
            if self.restarts == "together":
                self._restart_all()
            self.start(node)

    def wait_for_ends(self, nodes: Collection[int], seconds: float) -> list[int]:
        """Return the exit codes of nodes, which have to end by themselves."""
        return [self._agents[node].wait(seconds) for node in nodes]

    def _next_to_end(self, deadline: float) -> int:
        """Return the node whose agent is the next to end."""
        files = {node: os.pidfd_open(agent.pid) for node, agent in self._agents.items()}
        try:
            seconds = max(0.0, deadline - time.monotonic())
            ended, _, _ = select.select(list(files.values()), [], [], seconds)
        finally:
            for file in files.values():
                os.close(file)
        assert ended, "\n".join(self.printed(node) for node in files)
        node = min(node for node, file in files.items() if file in ended)
        self._agents[node].wait()
        return node

    def printed(self, node: int) -> str:
        """Return what the agents of a node have printed."""
        return (self.run_dir / f"agent-{node}.txt").read_text()

    def all_printed(self) -> Sequence[str]:
        """Return what the agents of each node have printed."""
        return [self.printed(node) for node in range(self._nodes)]
