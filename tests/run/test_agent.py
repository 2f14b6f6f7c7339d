"""The agent with real processes: which exit code comes out, who gets which signal, and that nobody is left behind."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kubetune.base import processes
from kubetune.config.resolved import resolved as whole_config
from kubetune.config.schema import Config
from kubetune.plan.plan import make_plan
from kubetune.rundir import exit_status, metrics

# The actors are modules of the tests' own.
PYTHONPATH = os.pathsep.join(
    filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))
)
AGENT = """
import sys
from pathlib import Path
from kubetune.supervisor import agent
from kubetune.base.signals import Relay
run_dir = Path(sys.argv[1])
place = agent.read_place(run_dir)
with Relay() as relay, agent.hold(run_dir, place.node):
    sys.exit(agent.supervise(run_dir, place, relay, prepare="tests.run.actor_prepare", worker="tests.run.actor"))
"""


class Agent:
    """A running agent process and what it and its ranks print."""

    def __init__(self, run_dir: Path, environ: dict[str, str | None]) -> None:
        self.errors = ""
        variables = {**os.environ, "PYTHONPATH": PYTHONPATH, **environ}
        self.process = subprocess.Popen(
            [sys.executable, "-c", AGENT, run_dir],
            env={name: value for name, value in variables.items() if value is not None},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_starts(self, count: int) -> dict[int, int]:
        """Return the process ids by rank of the next `count` actors that start."""
        assert self.process.stdout is not None
        started: dict[int, int] = {}
        # Between them the agent says what the start is at.
        while len(started) < count:
            line = self.process.stdout.readline()
            assert line, self.errors
            if line.startswith("started "):
                _, rank, pid = line.split()
                started[int(rank)] = int(pid)
        return started

    def finish(self, seconds: float = 60) -> int:
        """Return the exit code. All processes below the agent are gone by then: communicate waits for their pipes."""
        _, self.errors = self.process.communicate(timeout=seconds)
        return self.process.returncode

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


Start = Callable[..., Agent]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Agent] = []

    def start_agent(
        roles: dict[str, dict[str, object]],
        *,
        processes: int = 1,
        nodes: int = 1,
        grace: int = 60,
        environ: dict[str, str | None] | None = None,
        resolved: dict[str, object] | None = None,
    ) -> Agent:
        config = Config.model_validate(
            {
                "model": "m",
                "data": {"train": "d"},
                "compute": {"processes": processes, "nodes": nodes},
            }
        )
        plan = make_plan(config).model_copy(update={"grace_seconds": grace})
        (tmp_path / "plan.json").write_text(plan.to_json())
        (tmp_path / "resolved.json").write_text(
            json.dumps({**whole_config(config), **(resolved or {})})
        )
        (tmp_path / "roles.json").write_text(json.dumps(roles))
        started.append(Agent(tmp_path, environ or {}))
        return started[-1]

    yield start_agent
    for agent in started:
        agent.kill()


def how_it_ended(run_dir: Path) -> tuple[int, str]:
    status = exit_status.read_exit_status(run_dir)
    assert status is not None
    return status.code, status.reason


def is_gone(pid: int, seconds: float = 30) -> bool:
    """True if a process has ended, or does so soon."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    ended = bool(poll.poll(seconds * 1000))
    os.close(pidfd)
    return ended


def environ_of(run_dir: Path, rank: int) -> dict[str, str]:
    environ: dict[str, str] = json.loads((run_dir / f"environ-{rank}.json").read_text())
    return environ


@pytest.mark.parametrize(
    "code", [0, 145, *(pytest.param(code, marks=pytest.mark.slow) for code in (1, 2, 3, 4, 143))]
)
def test_a_single_rank_is_started_directly_and_its_code_passed_on(
    tmp_path: Path, start: Start, code: int
) -> None:
    agent = start({"0": {"end": code}})
    assert agent.finish() == code
    assert how_it_ended(tmp_path) == (code, f"told to end with {code}")
    assert metrics.read_events(tmp_path)[-1]["code"] == code
    environ = environ_of(tmp_path, 0)
    assert (environ["RANK"], environ["WORLD_SIZE"]) == ("0", "1")
    assert "TORCHELASTIC_RUN_ID" not in environ
    assert (agent.errors == "") == (code == 0)


def test_a_killed_rank_is_named_and_retryable(tmp_path: Path, start: Start) -> None:
    agent = start({"0": {"kill": signal.SIGKILL}})
    assert agent.finish() == 145
    assert "rank 0 was killed by SIGKILL" in how_it_ended(tmp_path)[1]
    assert "rank 0 was killed by SIGKILL" in agent.errors


def test_ending_well_needs_the_word_of_the_rank_and_an_earlier_ending_does_not_count(
    tmp_path: Path, start: Start
) -> None:
    assert start({"0": {"end": 2}}).finish() == 2
    assert start({"0": {"status": 0}}).finish() == 1
    assert "without saying how" in how_it_ended(tmp_path)[1]


def test_sigterm_is_passed_on_once_and_waited_for(tmp_path: Path, start: Start) -> None:
    agent = start({"0": {"wait": True}})
    agent.wait_for_starts(1)
    agent.process.send_signal(signal.SIGTERM)
    agent.process.send_signal(signal.SIGTERM)
    assert agent.finish() == 143
    assert how_it_ended(tmp_path) == (143, "told to end with 143")
    assert agent.errors.count("stopping:") == 1


def test_the_second_ctrl_c_kills(tmp_path: Path, start: Start) -> None:
    agent = start({"0": {"wait": True, "deaf": True}})
    agent.wait_for_starts(1)
    agent.process.send_signal(signal.SIGINT)
    assert agent.process.stderr is not None
    while "stopping:" not in agent.process.stderr.readline():
        pass
    agent.process.send_signal(signal.SIGINT)
    assert agent.finish() == 143
    assert "second Ctrl-C" in how_it_ended(tmp_path)[1]


def test_who_does_not_stop_within_the_grace_time_is_killed(tmp_path: Path, start: Start) -> None:
    agent = start({"0": {"wait": True, "deaf": True}}, grace=1)
    agent.wait_for_starts(1)
    agent.process.terminate()
    assert agent.finish() == 143
    assert "after 1 s" in how_it_ended(tmp_path)[1]


def test_sigterm_during_preparation_ends_quickly(tmp_path: Path, start: Start) -> None:
    agent = start({"prepare": {"wait": True}}, processes=2)
    agent.wait_for_starts(1)
    agent.process.terminate()
    assert agent.finish() == 143


def test_a_failed_preparation_starts_no_rank(tmp_path: Path, start: Start) -> None:
    assert start({"prepare": {"end": 2}}, processes=2).finish() == 2
    assert how_it_ended(tmp_path) == (2, "told to end with 2")
    assert not (tmp_path / "environ-1.json").exists()


def test_no_rank_outlives_a_killed_agent(start: Start) -> None:
    agent = start({"0": {"wait": True, "deaf": True}})
    (pid,) = agent.wait_for_starts(1).values()
    agent.process.kill()
    agent.finish()
    assert is_gone(pid)


def test_a_second_agent_is_refused_and_a_stale_lock_is_none(tmp_path: Path, start: Start) -> None:
    first = start({"0": {"wait": True}})
    first.wait_for_starts(1)
    second = start({"0": {}})
    assert second.finish() != 0
    assert f"process {first.process.pid}" in second.errors
    first.process.kill()
    first.finish()
    assert start({"0": {}}).finish() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a process namespace")
def test_process_1_of_a_container_heeds_sigterm(tmp_path: Path, start: Start) -> None:
    start({"0": {"wait": True}}).kill()
    unshared = [
        "unshare",
        "--pid",
        "--fork",
        "--kill-child",
        sys.executable,
        "-c",
        AGENT,
        str(tmp_path),
    ]
    with subprocess.Popen(
        unshared,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as outer:
        assert outer.stdout is not None
        # A busy machine says first that the agent is still starting.
        assert any(line.startswith("started 0") for line in outer.stdout)
        (process_1,) = processes.children(outer.pid)
        os.kill(process_1, signal.SIGTERM)
        assert outer.wait(60) == 143


# Stands before the real module, the first that the agent imports, and asks the agent to stop at that moment.
ARGPARSE = """
import importlib, os, signal, sys
os.kill(os.getpid(), signal.SIGTERM)
sys.path.remove(os.path.dirname(__file__))
del sys.modules["argparse"]
importlib.import_module("argparse")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a process namespace")
def test_process_1_is_stopped_while_it_imports(tmp_path: Path) -> None:
    """Though the kernel throws away what process 1 neither handles nor blocks."""
    config = Config.model_validate({"model": "m", "data": {"train": "d"}})
    (tmp_path / "plan.json").write_text(make_plan(config).to_json())
    (tmp_path / "resolved.json").write_text(json.dumps(whole_config(config)))
    early = tmp_path / "early"
    early.mkdir()
    (early / "argparse.py").write_text(ARGPARSE)
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-m", "kubetune.agent", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(early), PYTHONPATH])},
        capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 143, done.stderr
    assert how_it_ended(tmp_path) == (143, "asked to stop by SIGTERM")


def test_two_ranks_run_under_torchrun_share_the_cores_and_are_both_reached_by_sigterm(
    tmp_path: Path, start: Start
) -> None:
    variables = {
        "OMP_NUM_THREADS": None,
        "GOMP_SPINCOUNT": None,
        "PET_NNODES": "7",
        "PET_MAX_RESTARTS": "3",
    }
    agent = start({"0": {"wait": True}, "1": {"wait": True}}, processes=2, environ=variables)
    agent.wait_for_starts(2)
    agent.process.terminate()
    assert agent.finish() == 143
    assert {rank: e.code for rank, e in exit_status.read_rank_exit_statuses(tmp_path).items()} == {
        0: 143,
        1: 143,
    }
    first = environ_of(tmp_path, 0)
    second = environ_of(tmp_path, 1)
    assert (first["RANK"], second["RANK"], first["WORLD_SIZE"]) == ("0", "1", "2")
    assert first["MASTER_ADDR"] == "127.0.0.1"
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert first["OMP_NUM_THREADS"] == str(max(1, processes.usable_cores() // 2))
    assert first["GOMP_SPINCOUNT"] == "10000"
    assert "Traceback" not in agent.errors


@pytest.mark.slow
def test_two_ranks_that_end_well_leave_no_word_on_standard_error(start: Start) -> None:
    agent = start({}, processes=2)
    assert agent.finish() == 0, agent.errors
    assert agent.errors == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("roles", "code", "reason"),
    [
        ({"0": {"wait": True}, "1": {"end": 2}}, 2, "rank 1: told to end with 2"),
        ({"0": {"wait": True}, "1": {"kill": signal.SIGKILL}}, 145, "rank 1 was killed by SIGKILL"),
    ],
    ids=["config error", "killed"],
)
def test_the_cause_among_two_ranks(
    tmp_path: Path, start: Start, roles: dict[str, dict[str, object]], code: int, reason: str
) -> None:
    agent = start(roles, processes=2)
    assert agent.finish() == code
    assert reason in how_it_ended(tmp_path)[1]
    assert "Traceback" not in agent.errors


@pytest.mark.slow
def test_two_ranks_do_not_outlive_their_torchrun(start: Start) -> None:
    agent = start(
        {"0": {"wait": True, "deaf": True}, "1": {"wait": True, "deaf": True}}, processes=2
    )
    ranks = agent.wait_for_starts(2)
    (torchrun,) = processes.children(agent.process.pid)
    os.kill(torchrun, signal.SIGKILL)
    assert agent.finish() == 145
    assert all(map(is_gone, ranks.values()))


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.slow
def test_two_nodes_meet_and_a_death_on_one_is_told_by_both(tmp_path: Path, start: Start) -> None:
    roles = {"0": {"end": 145}, "1": {"kill": signal.SIGKILL}}
    port = free_port()
    agents = [
        start(
            roles,
            nodes=2,
            environ={"NODE_RANK": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        )
        for n in range(2)
    ]
    assert [agent.finish() for agent in agents] == [145, 145]
    assert environ_of(tmp_path, 1)["WORLD_SIZE"] == "2"


@pytest.mark.slow
def test_a_node_that_waits_for_others_stops_at_once(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent_master:
        port = str(silent_master.getsockname()[1])
        agent = start(
            {}, nodes=2, environ={"NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        )
        connection, _ = silent_master.accept()
        # From now on it waits for an answer in C++, where it looks at no signal.
        agent.process.terminate()
        assert agent.finish() == 143
        connection.close()


@pytest.mark.slow
def test_a_node_that_never_comes_is_named_in_time(tmp_path: Path, start: Start) -> None:
    """Two nodes at once, each of which waits for the other elsewhere."""
    ports = free_port(), free_port()
    environs = [
        {"NODE_RANK": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for n, port in enumerate(ports)
    ]
    patience: dict[str, object] = {"training": {"timeout_seconds": 1}}
    agents = [start({}, nodes=2, environ=dict(environ), resolved=patience) for environ in environs]
    absent = (
        "node 1 never came: 2 nodes were to meet",
        f"did not find node 0 at 127.0.0.1:{ports[1]} within 1 s",
    )
    for agent, named in zip(agents, absent, strict=True):
        assert agent.finish() == 145
        assert named in agent.errors
        assert "Traceback" not in agent.errors
        assert "frame #" not in agent.errors  # the stack of torch's C++
    assert absent[0] in how_it_ended(tmp_path)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("node", "code", "message"),
    [
        (0, 3, "node 0 cannot listen at 127.0.0.1:"),
        (
            1,
            145,
            "something there takes connections and does not answer; it is stopped, or another program",
        ),
    ],
)
def test_an_address_that_another_program_has_is_told_in_time(
    start: Start, node: int, code: int, message: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environ = {
            "NODE_RANK": str(node),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(silent.getsockname()[1]),
        }
        agent = start(
            {}, nodes=2, environ=dict(environ), resolved={"training": {"timeout_seconds": 1}}
        )
        assert agent.finish() == code
    assert message in agent.errors
    assert "frame #" not in agent.errors


def test_a_node_that_does_not_know_its_place_says_what_is_missing(start: Start) -> None:
    agent = start({}, nodes=2, environ={"MASTER_PORT": "http"})
    assert agent.finish() == 1
    for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        assert f"{name} (or" in agent.errors
