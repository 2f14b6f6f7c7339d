"""Checkpoints written while training goes on: the same bytes, whole or not there, and nothing lost but the one."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from kubetune import errors
from kubetune.config.schema import Config
from kubetune.rundir import checkpoints, metrics
from kubetune.rundir.checkpoints import folder_of
from kubetune.training import worker
from tests import toy
from tests.ranks import started, wait_all, wait_until

slow = pytest.mark.slow
LORA: dict[str, Any] = {"lora": {"r": 4, "dropout": 0.1}}
FULL: dict[str, Any] = {"lora": None}


def make_config(
    inputs: Path, async_save: bool, parallelism: str = "ddp", **sections: Any
) -> Config:
    return toy.make_config(
        inputs, {"async_save": async_save, "parallelism": parallelism}, **sections
    )


def all_digests(run_dir: Path) -> dict[int, dict[str, str]]:
    return {
        step: toy.digests(run_dir, folder_of(run_dir, step).name)
        for step in checkpoints.steps(run_dir)
    }


@pytest.mark.parametrize(
    ("sections", "parallelism", "world_size"),
    [
        pytest.param(LORA, "ddp", 1, id="lora"),
        pytest.param(FULL, "ddp", 1, id="full", marks=slow),
        pytest.param(FULL, "fsdp", 2, id="full, sharded", marks=slow),
        pytest.param(LORA, "fsdp", 2, id="lora, sharded", marks=slow),
    ],
)
def test_every_checkpoint_holds_the_bytes_it_would_hold_otherwise(
    inputs: Path, tmp_path: Path, sections: dict[str, Any], parallelism: str, world_size: int
) -> None:
    beside, between = (
        toy.finished(
            tmp_path / str(on), make_config(inputs, on, parallelism, **sections), world_size
        )
        for on in (True, False)
    )
    assert all_digests(beside) == all_digests(between)
    assert os.readlink(beside / "checkpoints" / "last") == "step-000014"
    assert toy.log_of(beside).count("saved checkpoint") == 5


@pytest.mark.parametrize(
    ("parallelism", "world_size"),
    [("ddp", 1), pytest.param("fsdp", 2, marks=slow)],
    ids=["ddp", "fsdp"],
)
def test_training_goes_on_and_a_kill_loses_only_the_one_being_written(
    inputs: Path, tmp_path: Path, parallelism: str, world_size: int
) -> None:
    config = make_config(inputs, True, parallelism, **FULL)
    whole = toy.digests(toy.finished(tmp_path / "whole", config, world_size))
    run_dir = toy.make_run(tmp_path / "run", config, world_size)
    environ = {"KUBETUNE_FAULT": "hang:commit.written:2"}
    with started(worker.main, world_size, [str(run_dir)], environ=environ) as processes:
        # The checkpoint of step 6 never ends, and three more steps and an evaluation are done meanwhile.
        wait_until(lambda: (run_dir / "metrics.jsonl").exists() and newest_step(run_dir) == 9)
        assert checkpoints.steps(run_dir) == [3]
        for process in processes:
            process.kill()
        assert wait_all(processes) == [-signal.SIGKILL] * world_size
    assert checkpoints.find(run_dir) == folder_of(run_dir, 3)
    assert toy.train(run_dir, world_size) == [0] * world_size
    assert toy.digests(run_dir) == whole
    assert not list(run_dir.glob("checkpoints/.*.tmp"))


def newest_step(run_dir: Path) -> int:
    return max((int(line["step"]) for line in metrics.read_metrics(run_dir)), default=0)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=slow)])
def test_a_stop_waits_for_the_checkpoint_being_written(
    inputs: Path, tmp_path: Path, world_size: int
) -> None:
    run_dir = toy.make_run(tmp_path / "run", make_config(inputs, True, **LORA), world_size)
    environ = {"KUBETUNE_FAULT": f"signal {signal.SIGTERM.value}:commit.written:1"}
    assert toy.train(run_dir, world_size, environ) == [errors.PREEMPTED] * world_size
    first, stopped = checkpoints.steps(run_dir)
    assert first == 3 < stopped <= 6
    for step in (first, stopped):
        assert checkpoints.verify(folder_of(run_dir, step)) is None
    assert os.readlink(run_dir / "checkpoints" / "last") == folder_of(run_dir, stopped).name


@pytest.mark.parametrize(
    ("parallelism", "world_size", "point"),
    [
        ("ddp", 1, "commit.weights"),
        pytest.param("fsdp", 2, "commit.part", marks=slow),
        pytest.param("ddp", 2, "commit.sealed", marks=slow),
    ],
)
def test_a_full_disk_ends_all_ranks_at_a_step(
    inputs: Path, tmp_path: Path, parallelism: str, world_size: int, point: str
) -> None:
    config = make_config(inputs, True, parallelism, **FULL)
    run_dir = toy.make_run(tmp_path / "run", config, world_size)
    environ = {
        "KUBETUNE_FAULT": f"error {errno.ENOSPC}:{point}:2:{world_size - 1 if parallelism == 'fsdp' else 0}"
    }
    assert toy.train(run_dir, world_size, environ) == [errors.ENVIRONMENT] * world_size
    log = toy.log_of(run_dir)
    assert "free some space and run the same command again" in log
    assert checkpoints.find(run_dir) == folder_of(run_dir, 3)
    assert len(toy.losses(run_dir)) <= 9  # the next checkpoint was not even begun
    if world_size > 1:  # that a single rank goes on is proved for kills
        assert toy.train(run_dir, world_size) == [0] * world_size
        whole = toy.finished(tmp_path / "whole", config, world_size)
        assert toy.digests(run_dir) == toy.digests(whole)
