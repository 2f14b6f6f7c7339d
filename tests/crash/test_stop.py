"""SIGTERM in every phase, to any rank: one checkpoint, exit code 143, soon, and the run goes on as if nothing were."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from kubetune import checkpoint, endings, errors, processes, train_worker
from tests import toy
from tests.ranks import started, wait_all, wait_until

LORA: dict[str, Any] = {"lora": {"r": 4, "dropout": 0.1}}
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("point", "nth", "saved"),
    [
        pytest.param("starting", 1, [], id="load"),
        pytest.param("step", 1, [1], id="first step", marks=slow),
        pytest.param("micro-batch", 8, [3, 5], id="accumulation"),
        pytest.param("evaluation", 1, [3, 4], id="evaluation"),
        pytest.param("commit.written", 1, [3, 4], id="save"),
    ],
)
@pytest.mark.parametrize(("world_size", "rank"), [(1, 0), pytest.param(2, 1, marks=slow)], ids=["alone", "rank 1"])
def test_stopped_in_each_phase(
    toy_inputs: Path, tmp_path: Path, uninterrupted: Any, world_size: int, rank: int, point: str, nth: int,
    saved: list[int],
) -> None:  # fmt: skip
    if world_size == 2 and point in ("starting", "commit.written"):
        pytest.skip("a lone rank that stops before the loop is lost to the others; only rank 0 writes")
    config = toy.make_config(toy_inputs, **LORA)
    run_dir = toy.make_run(tmp_path / "run", config, world_size)
    codes = toy.train(run_dir, world_size, {"KUBETUNE_FAULT": f"signal 15:{point}:{nth}:{rank}"})
    assert codes == [errors.PREEMPTED] * world_size
    steps = {ending.step for ending in endings.read_rank_endings(run_dir).values()}
    if world_size == 1:
        assert checkpoint.steps(run_dir) == saved
        assert steps == {saved[-1] if saved else 0}
    else:
        assert steps == {checkpoint.steps(run_dir)[-1]}
    assert toy.train(run_dir, world_size) == [0] * world_size
    assert toy.digests(run_dir) == uninterrupted(config, world_size)


def test_stopped_while_it_prepares(toy_inputs: Path, tmp_path: Path) -> None:
    """Nothing to save, so at once, and nobody is left who prepares on."""
    config = toy.make_config(toy_inputs, data={"cache": str(tmp_path / "cache")})
    run_dir = toy.make_run(tmp_path / "run", config)
    with started(train_worker.main, 1, [str(run_dir)], environ={"KUBETUNE_FAULT": "hang:prepare"}) as (process,):
        wait_until(lambda: any((tmp_path / "cache" / "prepared").glob(".*.tmp/train/tokens*")))
        assert process.pid is not None
        below = processes.children(process.pid)
        began = time.monotonic()
        process.terminate()
        assert wait_all([process]) == [errors.PREEMPTED]
    assert time.monotonic() - began < 5
    assert below
    wait_until(lambda: not any(processes.is_alive(pid) for pid in below), seconds=5)
    assert toy.train(run_dir) == [0]


def test_asked_twice_it_saves_once(toy_inputs: Path, tmp_path: Path, uninterrupted: Any) -> None:
    config = toy.make_config(toy_inputs, {"save_steps": 14}, **LORA)
    run_dir = toy.make_run(tmp_path / "run", config)
    with started(train_worker.main, 1, [str(run_dir)], environ={"KUBETUNE_FAULT": "signal 15:step:2"}) as (process,):
        wait_until(lambda: process.exitcode is not None or "asked to stop" in log(run_dir))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        assert wait_all([process]) == [errors.PREEMPTED]
    assert log(run_dir).count("saved checkpoint") == 1
    assert toy.train(run_dir) == [0]


def log(run_dir: Path) -> str:
    path = run_dir / "logs" / "rank-0.log"
    return path.read_text() if path.exists() else ""
