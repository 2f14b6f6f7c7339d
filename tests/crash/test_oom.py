"""Ranks that the kernel really kills for memory, in a control group of their own, and ranks that somebody kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kubetune import errors
from kubetune.base import cgroup
from kubetune.config.resolved import resolved
from kubetune.config.schema import Config
from kubetune.plan.plan import make_plan
from kubetune.rundir import exit_status, metrics
from tests import toy

PYTHONPATH = os.pathsep.join(
    filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))
)
AGENT = """
import sys
from pathlib import Path
from kubetune.supervisor import agent
from kubetune.base import cgroup
from kubetune.base.signals import Relay
cgroup.MEMBERSHIP = Path(sys.argv[2])
with Relay() as relay:
    run_dir = Path(sys.argv[1])
    place = agent.read_place(run_dir)
    sys.exit(agent.supervise(run_dir, place, relay, prepare="tests.run.actor_prepare", worker="tests.run.actor"))
"""
MEBIBYTE = 1 << 20


class Group:
    """A control group with a memory limit that this test may set, and what to write where to enter it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def allow(self, limit: int) -> None:
        is_first = (self.folder / "memory.limit_in_bytes").exists()
        (self.folder / ("memory.limit_in_bytes" if is_first else "memory.max")).write_text(
            str(limit)
        )
        with suppress(OSError):  # of version 2; version 1 has no swap here
            (self.folder / "memory.swap.max").write_text("0")

    def run(self, command: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
        enter = ["sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh", *command]
        variables = {**os.environ, "PYTHONPATH": PYTHONPATH, **environ}
        return subprocess.run(enter, env=variables, capture_output=True, text=True, timeout=120)


@pytest.fixture
def group() -> Iterator[Group]:
    """Yield a group below the root, where this user may make one."""
    name = f"kubetune-test-{os.getpid()}"
    for folder in (cgroup.ROOT / "memory" / name, cgroup.ROOT / name):
        with suppress(OSError):
            folder.mkdir()
            if any((folder / file).exists() for file in ("memory.limit_in_bytes", "memory.max")):
                yield Group(folder)
                folder.rmdir()
                return
            folder.rmdir()
    pytest.skip("making control groups needs root")


def make_run(run_dir: Path, role: dict[str, int]) -> None:
    """Make a run of one process that plays a role."""
    run_dir.mkdir(exist_ok=True)
    config = Config.model_validate(
        {"model": "m", "data": {"train": "d"}, "compute": {"processes": 1}}
    )
    (run_dir / "plan.json").write_text(make_plan(config).to_json())
    (run_dir / "resolved.json").write_text(json.dumps(resolved(config)))
    (run_dir / "roles.json").write_text(json.dumps({"0": role}))


def agent_of(run_dir: Path, membership: Path = cgroup.MEMBERSHIP) -> list[str]:
    return [sys.executable, "-c", AGENT, str(run_dir), str(membership)]


def verdict(run_dir: Path) -> exit_status.ExitStatus:
    status = exit_status.read_exit_status(run_dir)
    assert status is not None
    return status


def train_to(run_dir: Path, step: int) -> None:
    (run_dir / metrics.METRICS).write_text(
        "".join(f'{{"step": {n}, "loss": 1.0}}\n' for n in range(1, step + 1))
    )


def test_a_rank_that_runs_out_of_memory_twice_without_getting_farther(
    group: Group, tmp_path: Path
) -> None:
    group.allow(160 * MEBIBYTE)
    make_run(tmp_path, {"fill": 600 * MEBIBYTE})
    codes = []
    for step in (7, 7):
        train_to(tmp_path, step)
        ended = group.run(agent_of(tmp_path))
        codes.append(ended.returncode)
        assert ended.returncode == verdict(tmp_path).code
        limit = f"{160 * MEBIBYTE:,} bytes for all ranks of this node"
        assert (
            f"was killed by SIGKILL for lack of memory, after step {step}; the memory limit is {limit}"
            in ended.stderr
        )
        assert "Traceback" not in ended.stderr
    assert codes == [errors.LOST_PEER, errors.OUT_OF_MEMORY]
    assert "this one got no further" in verdict(tmp_path).reason
    assert "compute.memory" in verdict(tmp_path).reason
    assert len(verdict(tmp_path).reason) < 320

    make_run(tmp_path, {"fill": MEBIBYTE})
    assert group.run(agent_of(tmp_path)).returncode == errors.OK


@pytest.mark.slow
def test_an_end_of_another_kind_between_two_kills_makes_them_two_beginnings(
    group: Group, tmp_path: Path
) -> None:
    group.allow(160 * MEBIBYTE)
    codes = []
    for role in ({"fill": 600 * MEBIBYTE}, {"end": errors.PREEMPTED}, {"fill": 600 * MEBIBYTE}):
        make_run(tmp_path, role)
        codes.append(group.run(agent_of(tmp_path)).returncode)
    assert codes == [errors.LOST_PEER, errors.PREEMPTED, errors.LOST_PEER]


@pytest.mark.slow
def test_a_kill_that_the_kernel_does_not_count_stays_worth_another_start(
    group: Group, tmp_path: Path
) -> None:
    group.allow(1024 * MEBIBYTE)
    make_run(tmp_path, {"kill": signal.SIGKILL})
    for _ in range(3):
        assert group.run(agent_of(tmp_path)).returncode == errors.LOST_PEER
        assert "rank 0 was killed by SIGKILL (not for memory" in verdict(tmp_path).reason


@pytest.mark.slow
def test_where_the_kernel_counts_nothing_two_kills_without_progress_are_enough(
    tmp_path: Path,
) -> None:
    make_run(tmp_path, {"kill": signal.SIGKILL})
    codes = []
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH}
    for step in (0, 3, 3):
        train_to(tmp_path, step)
        codes.append(
            subprocess.run(
                agent_of(tmp_path, tmp_path / "none"), env=environ, check=False
            ).returncode
        )
    assert codes == [errors.LOST_PEER, errors.LOST_PEER, errors.OUT_OF_MEMORY]
    assert (
        "or by somebody's kill -9, after step 3; no memory limit is set" in verdict(tmp_path).reason
    )


@pytest.mark.slow
def test_two_ranks_that_train_under_a_limit(group: Group, toy_inputs: Path, tmp_path: Path) -> None:
    group.allow(2048 * MEBIBYTE)
    run_dir = toy.make_run(
        tmp_path / "run", toy.make_config(toy_inputs, compute={"processes": 2}), 2
    )
    command = [sys.executable, "-P", "-m", "kubetune.agent", str(run_dir)]
    for code, words in (
        (errors.LOST_PEER, "for lack of memory, after step 4"),
        (errors.OUT_OF_MEMORY, "no further"),
    ):
        fault = (
            "fill:step:5:1" if code == errors.LOST_PEER else "fill:step:2:1"
        )  # it goes on after step 3
        ended = group.run(command, KUBETUNE_FAULT=fault)
        assert ended.returncode == code, ended.stderr
        assert words in verdict(run_dir).reason
        assert "Traceback" not in ended.stdout + ended.stderr
    assert group.run(command).returncode == errors.OK


def test_the_process_that_prepares_data_is_killed(toy_inputs: Path, tmp_path: Path) -> None:
    config = toy.make_config(toy_inputs, data={"cache": str(tmp_path / "cache")})
    run_dir = toy.make_run(tmp_path / "run", config)
    assert toy.train(run_dir, 1, {"KUBETUNE_FAULT": "signal 9:write manifest.json"}) == [
        errors.ENVIRONMENT
    ]
    log = toy.log_of(run_dir)
    assert "the process that prepares the data was killed (out of memory" in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        (
            "0::/pod/one\n",
            {
                "pod/one/memory.max": "max",
                "pod/memory.max": "5000",
                "pod/one/memory.events": "oom 4\noom_kill 3\n",
            },
        ),
        (
            "0::/elsewhere\n",
            {"memory.max": "5000", "memory.events": "oom_kill 3\noom_group_kill 7\n"},
        ),
        (
            "5:cpu:/x\n4:memory:/pod\n0::/\n",
            {
                "memory/pod/memory.limit_in_bytes": "5000",
                "memory/pod/memory.oom_control": "under_oom 0\noom_kill 3\n",
            },
        ),
    ],
    ids=["version 2, the limit above", "version 2, in a container", "version 1"],
)
def test_what_a_control_group_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, membership: str, files: dict[str, str]
) -> None:
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    monkeypatch.setattr(cgroup, "ROOT", tmp_path / "root")
    monkeypatch.setattr(cgroup, "MEMBERSHIP", tmp_path / "membership")
    assert (cgroup.memory_limit(), cgroup.oom_kills()) == (5000, 3)
    monkeypatch.setattr(cgroup, "MEMBERSHIP", tmp_path / "none")
    assert (cgroup.memory_limit(), cgroup.oom_kills()) == (None, None)
