"""SIGTERM in every phase, to any rank: one checkpoint, exit code 143, soon, and the run goes on as if nothing were."""

from __future__ import annotations

import json
import os
import signal
import socket
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from kubetune import errors
from kubetune.base import processes
from kubetune.rundir import checkpoints, exit_status
from kubetune.training import worker
from tests import toy
from tests.ranks import started, wait_all, wait_until

LORA: dict[str, Any] = {"lora": {"r": 4, "dropout": 0.1}}
FULL: dict[str, Any] = {"lora": None}
slow = pytest.mark.slow


def stop_at(run_dir: Path, world_size: int, point: str, nth: int, rank: int = 0) -> list[int]:
    """Return the exit codes of ranks of which one gets SIGTERM at a point."""
    environ = {"KUBETUNE_FAULT": f"signal 19:{point}:{nth}:{rank}"}
    with started(worker.main, world_size, [str(run_dir)], environ=environ) as ranks:
        toy.wait_until_stopped(ranks[rank])
        ranks[rank].terminate()
        toy.go_on(ranks[rank])
        return wait_all(ranks)


@pytest.mark.parametrize(
    ("point", "nth", "saved"),
    [
        pytest.param("starting", 1, [], id="load"),
        pytest.param("step", 1, [1], id="first step", marks=slow),
        pytest.param("micro-batch", 8, [3, 5], id="accumulation", marks=slow),
        pytest.param("evaluation", 1, [3, 4], id="evaluation", marks=slow),
        pytest.param("commit.written", 1, [3, 4], id="save"),
    ],
)
def test_stopped_in_each_phase(
    toy_inputs: Path, tmp_path: Path, uninterrupted: Any, point: str, nth: int, saved: list[int]
) -> None:
    config = toy.make_config(toy_inputs, **LORA)
    run_dir = toy.make_run(tmp_path / "run", config)
    assert stop_at(run_dir, 1, point, nth) == [errors.PREEMPTED]
    assert checkpoints.steps(run_dir) == saved
    assert exit_status.read_rank_exit_statuses(run_dir)[0].step == (saved[-1] if saved else 0)
    assert toy.train(run_dir) == [0]
    assert toy.digests(run_dir) == uninterrupted(config, 1)


def kept_files(run_dir: Path) -> dict[str, Any]:
    """Return the content of every file in a run's checkpoints and of its numbers, but for how long the steps took."""
    kept: dict[str, Any] = {"metrics": (run_dir / "metrics.jsonl").read_bytes()}
    for path in sorted((run_dir / "checkpoints").rglob("*")):
        name = str(path.relative_to(run_dir))
        if path.is_symlink():
            kept[name] = os.readlink(path)
        elif path.name == checkpoints.STATE:
            kept[name] = {**json.loads(path.read_text()), "seconds": 0.0}
        elif path.name == checkpoints.MANIFEST:
            sums = json.loads(path.read_text())
            del sums["files"][checkpoints.STATE]
            kept[name] = sums
        elif path.is_file():
            kept[name] = path.read_bytes()
    return kept


@pytest.mark.parametrize(
    ("step", "async_save"),
    [
        (3, True),
        pytest.param(3, False, marks=slow),
        pytest.param(14, False, marks=slow),
        pytest.param(14, True, marks=slow),
    ],
)
def test_a_stop_before_an_evaluation_that_is_due_changes_no_file(
    toy_inputs: Path, tmp_path: Path, step: int, async_save: bool
) -> None:
    """In the last step, and in one before it."""
    training = {"save_total_limit": 9, "async_save": async_save}
    config = toy.make_config(toy_inputs, training, **LORA)
    run_dir = toy.make_run(tmp_path / "run", config)
    assert toy.train(run_dir, environ={"KUBETUNE_FAULT": f"signal 15:step:{step}"}) == [
        errors.PREEMPTED
    ]
    stopped_at = checkpoints.load_state(run_dir / "checkpoints" / "last")
    assert stopped_at.evaluated_step < stopped_at.step == step
    assert toy.train(run_dir) == [0]
    whole = toy.finished(tmp_path / "whole", config)
    assert kept_files(run_dir) == kept_files(whole)


@pytest.mark.parametrize(
    ("point", "evaluated"),
    [
        pytest.param("commit.sealed", False, marks=slow),
        ("commit.former", False),
        pytest.param("commit.renamed", True, marks=slow),
    ],
)
def test_killed_while_the_step_of_a_stop_is_saved_once_more(
    toy_inputs: Path, tmp_path: Path, point: str, evaluated: bool
) -> None:
    """No moment leaves the step without its checkpoint, though it is the only one."""
    training = {"max_steps": 3, "save_total_limit": 1}
    config = toy.make_config(toy_inputs, training, **LORA)
    run_dir = toy.make_run(tmp_path / "run", config)
    assert toy.train(run_dir, environ={"KUBETUNE_FAULT": "signal 15:step:3"}) == [errors.PREEMPTED]
    assert toy.train(run_dir, environ={"KUBETUNE_FAULT": f"signal 9:{point}"}) == [-signal.SIGKILL]
    checkpoints.clean(run_dir)
    saved = checkpoints.find(run_dir)
    assert saved == checkpoints.folder_of(run_dir, 3)
    assert checkpoints.load_state(saved).evaluated_step == (3 if evaluated else 0)
    assert toy.train(run_dir) == [0]
    assert kept_files(run_dir) == kept_files(toy.finished(tmp_path / "whole", config))


@pytest.mark.parametrize(
    ("world_size", "point"),
    [
        pytest.param(1, "preflight of a save", marks=slow),
        pytest.param(1, "preflight of a batch", marks=slow),
        pytest.param(2, "evaluation", marks=slow),
    ],
)
def test_stopped_in_the_rehearsal_before_the_first_step(
    toy_inputs: Path, tmp_path: Path, uninterrupted: Any, world_size: int, point: str
) -> None:
    """Nothing to save; of two ranks the kernel ends them, whatever library they are in."""
    run_dir = toy.make_run(
        tmp_path / "run", toy.make_config(toy_inputs, {"preflight": True}, **LORA), world_size
    )
    codes = stop_at(run_dir, world_size, point, 1)
    assert codes[0] == (errors.PREEMPTED if world_size == 1 else -signal.SIGTERM)
    assert checkpoints.steps(run_dir) == []
    assert toy.train(run_dir, world_size) == [0] * world_size
    assert not list(run_dir.glob("checkpoints/.*.tmp"))
    assert toy.digests(run_dir) == uninterrupted(toy.make_config(toy_inputs, **LORA), world_size)


def test_a_start_that_is_stopped_before_it_trains_says_how_far_the_run_is(
    toy_inputs: Path, tmp_path: Path
) -> None:
    run_dir = toy.make_run(tmp_path / "run", toy.make_config(toy_inputs, **LORA))
    assert stop_at(run_dir, 1, "starting", 1) == [errors.PREEMPTED]
    assert exit_status.read_rank_exit_statuses(run_dir)[0].reason.startswith(
        "stopped before the first step; "
    )
    assert toy.train(run_dir, environ={"KUBETUNE_FAULT": "signal 15:step:5"}) == [errors.PREEMPTED]
    for _ in range(2):
        status = exit_status.read_rank_exit_statuses(run_dir)[0]
        assert (status.step, status.reason.startswith("stopped after step 5; ")) == (5, True)
        assert stop_at(run_dir, 1, "starting", 1) == [errors.PREEMPTED]


@pytest.mark.parametrize(
    ("parallelism", "point", "nth", "rank"),
    [
        pytest.param("ddp", "step", 1, 1, marks=slow),
        ("ddp", "micro-batch", 8, 1),
        pytest.param("ddp", "evaluation", 1, 1, marks=slow),
        pytest.param("ddp", "commit.written", 1, 0, marks=slow),
        pytest.param("fsdp", "micro-batch", 8, 1, marks=slow),
        pytest.param("fsdp", "evaluation", 1, 0, marks=slow),
        pytest.param("fsdp", "commit.part", 1, 1, marks=slow),
    ],
)
def test_one_rank_is_told_and_both_stop_after_the_same_step(
    toy_inputs: Path,
    tmp_path: Path,
    uninterrupted: Any,
    parallelism: str,
    point: str,
    nth: int,
    rank: int,
) -> None:
    config = toy.make_config(
        toy_inputs, {"parallelism": parallelism}, **(FULL if parallelism == "fsdp" else LORA)
    )
    run_dir = toy.make_run(tmp_path / "run", config, 2)
    assert stop_at(run_dir, 2, point, nth, rank) == [errors.PREEMPTED] * 2
    assert {status.step for status in exit_status.read_rank_exit_statuses(run_dir).values()} == {
        checkpoints.steps(run_dir)[-1]
    }
    assert toy.train(run_dir, 2) == [0, 0]
    assert toy.digests(run_dir) == uninterrupted(config, 2)


def test_a_rank_that_nobody_meets_stops_at_once(toy_inputs: Path, tmp_path: Path) -> None:
    """In init_process_group C++ waits, where Python would hear of no signal."""
    run_dir = toy.make_run(tmp_path / "run", toy.make_config(toy_inputs), 2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        meeting = {
            "WORLD_SIZE": "2",
            "RANK": "1",
            "LOCAL_RANK": "1",
            "MASTER_PORT": str(silent.getsockname()[1]),
        }
        with started(worker.main, 1, [str(run_dir)], environ=meeting) as (process,):
            silent.settimeout(60)
            connection, _ = silent.accept()
            with connection:
                process.terminate()
                assert wait_all([process]) == [-signal.SIGTERM]
    assert (
        exit_status.judge([1], {}, [exit_status.Death(1, -signal.SIGTERM, 0.0)]).code
        == errors.PREEMPTED
    )


@pytest.mark.parametrize("num_proc", [1, pytest.param(2, marks=slow)])
def test_stopped_while_it_prepares(toy_inputs: Path, tmp_path: Path, num_proc: int) -> None:
    """Nothing to save, so at once, and nobody is left who prepares on."""
    config = toy.make_config(
        toy_inputs, {"max_steps": 2}, data=much_data(toy_inputs, tmp_path, num_proc)
    )
    run_dir = toy.make_run(tmp_path / "run", config)
    with started(worker.main, 1, [str(run_dir)], environ={"KUBETUNE_FAULT": "hang:prepare"}) as (
        process,
    ):
        wait_until(lambda: any((tmp_path / "cache" / "prepared").glob(".*.tmp/train/tokens*")))
        pid = process.pid
        assert pid is not None
        wait_until(lambda: len(toy.descendants(pid)) >= (1 if num_proc == 1 else 1 + num_proc))
        below = toy.descendants(pid)
        process.terminate()
        assert wait_all([process]) == [errors.PREEMPTED]
    wait_until(lambda: not any(processes.is_alive(pid) for pid in below))
    assert toy.train(run_dir) == [0]


@pytest.mark.parametrize("num_proc", [1, 2])
def test_processes_that_prepare_ignore_a_stop(
    toy_inputs: Path, tmp_path: Path, num_proc: int
) -> None:
    """A SIGTERM to the whole group must not look like a worker that died."""
    config = toy.make_config(
        toy_inputs, {"max_steps": 2}, data=much_data(toy_inputs, tmp_path, num_proc)
    )
    run_dir = toy.make_run(tmp_path / "run", config)
    with started(
        worker.main, 1, [str(run_dir)], environ={"KUBETUNE_FAULT": "signal 19:prepare"}
    ) as (process,):
        (preparing,) = wait_for_children(process)
        wait_until(lambda: toy.is_stopped(preparing))
        below = processes.children(preparing)
        assert len(below) >= (num_proc if num_proc > 1 else 0)
        for pid in [preparing, *below]:
            os.kill(pid, signal.SIGTERM)
        os.kill(preparing, signal.SIGCONT)
        assert wait_all([process]) == [0]


def much_data(toy_inputs: Path, folder: Path, num_proc: int) -> dict[str, Any]:
    """Return data to prepare anew; with several processes so much that they are really started."""
    rows = (toy_inputs / "train.jsonl").read_text() * (60 if num_proc > 1 else 1)
    (folder / "train.jsonl").write_text(rows)
    return {
        "train": str(folder / "train.jsonl"),
        "cache": str(folder / "cache"),
        "num_proc": num_proc,
    }


def wait_for_children(process: ForkServerProcess) -> list[int]:
    assert process.pid is not None
    pid = process.pid
    wait_until(lambda: processes.children(pid))
    return processes.children(pid)


def test_asked_twice_it_saves_once(toy_inputs: Path, tmp_path: Path, uninterrupted: Any) -> None:
    config = toy.make_config(toy_inputs, {"save_steps": 14}, **LORA)
    run_dir = toy.make_run(tmp_path / "run", config)
    with started(
        worker.main, 1, [str(run_dir)], environ={"KUBETUNE_FAULT": "signal 15:step:2"}
    ) as (process,):
        wait_until(lambda: process.exitcode is not None or "asked to stop" in log(run_dir))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        assert wait_all([process]) == [errors.PREEMPTED]
    assert log(run_dir).count("saved checkpoint") == 1
    assert toy.train(run_dir) == [0]


def log(run_dir: Path) -> str:
    path = run_dir / "logs" / "rank-0.log"
    return path.read_text() if path.exists() else ""
