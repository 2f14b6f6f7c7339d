"""A node's machine is cut off from the others, as by a loss of power: real agents in network namespaces of their own.

The other side gets no packet any more, so no connection is closed. Only ranks are played (`actor`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kubetune import errors
from kubetune.base import processes
from kubetune.config.resolved import resolved as whole_config
from kubetune.config.schema import Config
from kubetune.plan.plan import make_plan
from kubetune.rundir import exit_status, metrics, waits
from tests.ranks import free_port, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make network namespaces"),
]

SILENT_SECONDS = 3.0
# Nobody may wait for it: tests wait far less.
TIMEOUT = 900
SECONDS = 120.0

# The actors are modules of the tests' own.
PYTHONPATH = os.pathsep.join(
    filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))
)
# The agent as it is, with less patience for a machine that answers nothing.
AGENT = f"""
import sys
from pathlib import Path
from kubetune.base.signals import Relay
from kubetune.supervisor import agent
from kubetune.supervisor.gang import peer_watch, wire
wire.SILENT_SECONDS = {SILENT_SECONDS}
peer_watch._LOSS_SECONDS = 0.5
run_dir = Path(sys.argv[1])
place = agent.read_place(run_dir)
with Relay() as relay, agent.hold(run_dir, place.node):
    sys.exit(agent.supervise(run_dir, place, relay, prepare="tests.run.actor_prepare", worker="tests.run.actor"))
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts:
    """Two machines with a cable between them, and a run with a node on each."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.names = [f"kubetune-{os.getpid()}-{node}" for node in range(2)]
        self._agents: list[subprocess.Popen[str]] = []
        self._port = free_port()
        config = Config.model_validate(
            {
                "model": "m",
                "data": {"train": "d"},
                "compute": {"processes": 1, "nodes": 2},
                "training": {"timeout_seconds": TIMEOUT},
            }
        )
        (run_dir / "logs").mkdir(parents=True)
        (run_dir / "plan.json").write_text(make_plan(config).to_json())
        (run_dir / "resolved.json").write_text(json.dumps(whole_config(config)))

    def connect(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        peer = ["peer", "name", "eth0", "netns", self.names[0]]
        ip("-n", self.names[1], "link", "add", "eth0", "type", "veth", *peer)
        for node, name in enumerate(self.names):
            ip("-n", name, "addr", "add", f"10.77.0.{node + 1}/24", "dev", "eth0")
            self.plug(node, "up")

    def plug(self, node: int, state: str) -> None:
        """Connect a machine (`up`), or cut it off (`down`)."""
        ip("-n", self.names[node], "link", "set", "eth0", state)

    def play(self, role: dict[str, object]) -> None:
        (self.run_dir / "roles.json").write_text(json.dumps({"0": role, "1": role}))

    def start(self, node: int) -> subprocess.Popen[str]:
        variables = {
            **os.environ,
            "PYTHONPATH": PYTHONPATH,
            "NODE_RANK": str(node),
            "MASTER_ADDR": "10.77.0.1",
            "MASTER_PORT": str(self._port),
        }
        command = ["ip", "netns", "exec", self.names[node], sys.executable, "-c", AGENT]
        agent = subprocess.Popen(
            [*command, str(self.run_dir)],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._agents.append(agent)
        return agent

    def start_waiting_ranks(self) -> list[subprocess.Popen[str]]:
        """Start both nodes, with ranks that only wait, and return their agents once the ranks run."""
        self.play({"wait": True})
        agents = [self.start(node) for node in range(2)]
        for agent in agents:
            assert agent.stdout is not None
            while not agent.stdout.readline().startswith("started"):
                assert agent.poll() is None
        return agents

    def remove(self) -> None:
        for agent in self._agents:
            agent.kill()
            agent.communicate()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path / "run")
    try:
        made.connect()
        yield made
    finally:
        made.remove()


def still_run(agents: list[subprocess.Popen[str]]) -> bool:
    """True if none ends while a lost machine would have been noticed three times."""
    for agent in agents:
        try:
            agent.wait(3 * SILENT_SECONDS / len(agents))
        except subprocess.TimeoutExpired:
            continue
        return False
    return True


@pytest.mark.parametrize("cut", [0, 1])
def test_a_machine_that_is_gone_is_named_and_waited_for_in_the_next_start(
    hosts: Hosts, cut: int
) -> None:
    agents = hosts.start_waiting_ranks()
    hosts.plug(cut, "down")
    assert [agent.wait(SECONDS) for agent in agents] == [errors.LOST_PEER] * 2
    exits = {}
    for event in metrics.read_events(hosts.run_dir):
        if event["event"] == "exit":
            exits[event["node"]] = event["reason"]
    for node in range(2):
        assert exits[node].startswith(f"node {1 - node} on ")
        assert "has not answered for 3 s: its machine or its network is gone" in exits[node]

    # Both are started again while the machine is away: they wait, and no start is lost.
    hosts.play({"end": 0})
    agents = [hosts.start(node) for node in range(2)]
    wait_until(lambda: "node 0 has waited for node 1" in (waits.read(hosts.run_dir) or ""))
    assert still_run(agents)
    hosts.plug(cut, "up")
    assert [agent.wait(SECONDS) for agent in agents] == [0, 0]
    status = exit_status.read_exit_status(hosts.run_dir)
    assert status is not None
    assert status.code == errors.OK


def test_a_short_cut_costs_nothing(hosts: Hosts) -> None:
    agents = hosts.start_waiting_ranks()
    hosts.plug(1, "down")
    hosts.plug(1, "up")
    assert still_run(agents)


def test_a_stopped_agent_is_not_taken_for_a_lost_machine(hosts: Hosts) -> None:
    """Nor is its torchrun: the kernel answers for both."""
    agents = hosts.start_waiting_ranks()
    stopped = [agents[1].pid, *processes.children(agents[1].pid)]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    assert still_run(agents[:1])
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    assert still_run(agents)


def test_a_killed_agent_ends_the_start_of_the_other_node_at_once(hosts: Hosts) -> None:
    agents = hosts.start_waiting_ranks()
    agents[1].kill()
    assert agents[0].wait(SECONDS) == errors.LOST_PEER
    status = exit_status.read_exit_status(hosts.run_dir)
    assert status is not None
    assert "is gone: its agent was killed, or its pod was deleted" in status.reason
