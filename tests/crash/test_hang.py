"""A rank that hangs or vanishes ends the run soon, non-zero, and it is said which one and where."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kubetune import errors
from kubetune.distributed import process_group
from kubetune.rundir import exit_status, heartbeat
from kubetune.rundir.heartbeat import HANG
from kubetune.training import worker
from tests import toy
from tests.ranks import started, wait_all

# Longer than loading the toy takes on a crowded machine, which is no hang.
TIMEOUT = 20.0

# For ranks that load nothing.
IMPATIENCE = 0.5


@pytest.fixture
def run_dir(toy_inputs: Path, tmp_path: Path) -> Path:
    return toy.make_run(
        tmp_path / "run", toy.make_config(toy_inputs, {"timeout_seconds": TIMEOUT}), 2
    )


@pytest.fixture
def patient_run(toy_inputs: Path, tmp_path: Path) -> Path:
    return toy.make_run(tmp_path / "run", toy.make_config(toy_inputs), 2)


def step_together(run_dir: str) -> int:
    """Return what ranks do at the least: meet, and then a step together, watched with little patience."""
    try:
        with (
            process_group.join(timeout_seconds=60) as world,
            heartbeat.watch(Path(run_dir), world.rank, IMPATIENCE),
        ):
            heartbeat.beat("step", 3)
            process_group.barrier(world)
    except errors.LostPeer as lost:
        return lost.exit_code
    return errors.OK


@pytest.fixture
def bare_run(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def test_a_hung_rank_is_named_with_phase_step_and_stack(bare_run: Path) -> None:
    with started(
        step_together, 2, str(bare_run), environ={"KUBETUNE_FAULT": "hang:step:1:1"}
    ) as ranks:
        assert wait_all(ranks) == [errors.LOST_PEER] * 2
    hang = json.loads((bare_run / HANG).read_text())
    assert (hang["rank"], hang["phase"], hang["step"], hang["waiting"]) == (1, "step", 3, False)
    assert hang["seconds"] >= IMPATIENCE
    assert "fault_injection.reach(phase)" in hang["stack"]
    verdict = exit_status.judge([0, 1], exit_status.read_rank_exit_statuses(bare_run), [])
    assert verdict.reason.startswith("rank 1 hung in step for ")


def test_a_rank_that_holds_the_interpreter_is_ended_from_outside_of_it(bare_run: Path) -> None:
    with started(
        step_together, 2, str(bare_run), environ={"KUBETUNE_FAULT": "freeze:step:1:1"}
    ) as ranks:
        assert wait_all(ranks) == [errors.LOST_PEER, errors.BUG]
    assert "in step_together" in (bare_run / "logs" / "rank-1.frozen.txt").read_text()


def break_at(run_dir: Path, world_size: int, fault: str) -> list[int]:
    return toy.train(run_dir, world_size, {"KUBETUNE_FAULT": fault})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "point", "rank", "step"),
    [
        (1, "micro-batch:8", 0, 4),
        (2, "step:4", 1, 3),
        (2, "evaluation", 1, 3),
        (2, "save", 0, 3),
        (2, "report", 1, 14),
    ],
)
def test_a_hung_rank_ends_the_run_and_is_named(
    run_dir: Path, world_size: int, point: str, rank: int, step: int
) -> None:
    where = point if ":" in point else f"{point}:1"
    assert break_at(run_dir, world_size, f"hang:{where}:{rank}") == [errors.LOST_PEER] * world_size
    hang = json.loads((run_dir / HANG).read_text())
    assert (hang["rank"], hang["phase"], hang["waiting"]) == (rank, where.split(":")[0], False)
    assert hang["step"] == step
    assert TIMEOUT <= hang["seconds"] <= TIMEOUT + 5
    assert "fault_injection.reach(phase)" in hang["stack"]
    verdict = exit_status.judge(range(world_size), exit_status.read_rank_exit_statuses(run_dir), [])
    assert verdict.code == errors.LOST_PEER
    assert verdict.reason.startswith(
        f"rank {rank} hung in {hang['phase']} for {hang['seconds']:.0f} s after step {step}"
    )


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_never_comes_is_named_by_the_others(
    toy_inputs: Path, tmp_path: Path, rank: int
) -> None:
    run_dir = toy.make_run(tmp_path / "run", toy.make_config(toy_inputs, {"timeout_seconds": 2}), 2)
    with started(
        worker.main, 2, [str(run_dir)], environ={"KUBETUNE_FAULT": f"hang:joining:1:{rank}"}
    ) as ranks:
        assert wait_all([ranks[1 - rank]]) == [errors.LOST_PEER]
    reason = exit_status.read_rank_exit_statuses(run_dir)[1 - rank].reason
    assert ("did not find rank 0 at 127.0.0.1:", "rank 1 never came: 2 ranks were to meet")[
        rank
    ] in reason
    assert "Traceback" not in (run_dir / "logs" / f"rank-{1 - rank}.log").read_text()


@pytest.mark.slow
def test_a_thread_that_hangs_while_it_writes_is_shown(toy_inputs: Path, tmp_path: Path) -> None:
    """The loop itself only waits for it, when the next checkpoint is due."""
    config = toy.make_config(toy_inputs, {"timeout_seconds": TIMEOUT, "async_save": True})
    run_dir = toy.make_run(tmp_path / "run", config)
    assert break_at(run_dir, 1, "hang:commit.sealed:1") == [errors.LOST_PEER]
    hang = json.loads((run_dir / HANG).read_text())
    assert (hang["rank"], hang["phase"], hang["step"]) == (0, "save", 6)
    (writing,) = (stack for name, stack in hang["threads"].items() if name.startswith("checkpoint"))
    assert "in reach" in writing
    assert "in finish" in hang["stack"]


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3])
def test_a_rank_that_holds_the_interpreter_is_ended_with_its_stack(
    run_dir: Path, step: int
) -> None:
    """Also one that does so before the watchdog had a turn."""
    assert break_at(run_dir, 2, f"freeze:step:{step}:1") == [errors.LOST_PEER, errors.BUG]
    assert "in loop" in (run_dir / "logs" / "rank-1.frozen.txt").read_text()


@pytest.mark.slow
def test_a_process_that_does_not_run_any_more_is_named_by_the_agent(
    toy_inputs: Path, tmp_path: Path
) -> None:
    """Stopped by the kernel, it cannot say anything itself; the other rank gives up, and torchrun kills both."""
    patience = TIMEOUT
    config = toy.make_config(toy_inputs, {"timeout_seconds": patience}, compute={"processes": 2})
    run_dir = toy.make_run(tmp_path / "run", config, 2)
    environ = {**os.environ, "KUBETUNE_FAULT": "signal 19:step:4:1"}
    done = subprocess.run(
        [sys.executable, "-m", "kubetune.agent", str(run_dir)], env=environ, capture_output=True
    )
    assert done.returncode == errors.LOST_PEER
    status = exit_status.read_exit_status(run_dir)
    assert status is not None
    assert status.code == errors.LOST_PEER
    assert status.reason.startswith("rank 1 was killed when its process had stood still for ")
    hang = json.loads((run_dir / HANG).read_text())
    assert hang["rank"] == 1
    assert hang["step"] == status.step <= 3  # ranks note it every two seconds only
    assert f"s, last seen in {hang['phase']} after step {hang['step']} (" in status.reason
    assert patience <= hang["seconds"] <= patience + 60
    assert toy.train(run_dir, 2) == [0, 0]


@pytest.mark.parametrize(
    ("rank", "code"),
    [
        (1, 0),
        (0, 7),
        *(pytest.param(rank, code, marks=pytest.mark.slow) for rank, code in ((0, 0), (1, 7))),
    ],
)
def test_a_rank_that_leaves_early_is_no_success(patient_run: Path, rank: int, code: int) -> None:
    """Even with exit code 0: the others do not wait for ever, and do not end well."""
    codes = break_at(patient_run, 2, f"exit {code}:micro-batch:9:{rank}")
    assert codes[rank] == code
    assert codes[1 - rank] == errors.LOST_PEER
    assert (
        exit_status.judge([0, 1], exit_status.read_rank_exit_statuses(patient_run), []).code
        == errors.LOST_PEER
    )


def test_a_run_that_goes_well_leaves_no_trace_of_its_watchdog(patient_run: Path) -> None:
    (patient_run / HANG).touch()
    assert toy.train(patient_run, 2) == [0, 0]
    assert not (patient_run / HANG).exists()
    assert not list(patient_run.rglob("*.frozen.txt"))
