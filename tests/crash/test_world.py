"""Another number of processes goes on with the same data, and damage to the newest checkpoint costs only that one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from kubetune import errors
from kubetune.rundir import checkpoints
from kubetune.rundir.checkpoints import folder_of
from tests import toy

SLOWLY = {"learning_rate": 1e-3}


@pytest.mark.parametrize(
    "sections", [{}, pytest.param({"lora": None}, marks=pytest.mark.slow)], ids=["lora", "full"]
)
@pytest.mark.parametrize(
    ("before", "after"),
    [(1, 2), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 1), (2, 4)))],
)
def test_another_world_size_keeps_the_losses(
    toy_inputs: Path, tmp_path: Path, before: int, after: int, sections: dict[str, Any]
) -> None:
    config = toy.make_config(toy_inputs, SLOWLY, **sections)
    run_dir = toy.make_run(tmp_path / "run", config, before)
    codes = toy.train(run_dir, before, {"KUBETUNE_FAULT": "signal 15:step:5"})
    assert codes == [errors.PREEMPTED] * before
    assert toy.train(run_dir, after) == [0] * after
    whole = toy.finished(tmp_path / "whole", config)
    assert toy.losses(run_dir) == pytest.approx(toy.losses(whole), abs=1e-5)


@pytest.fixture(scope="module")
def stopped(toy_inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that was stopped after step 7, with checkpoints of steps 3, 6 and 7."""
    run_dir = toy.make_run(tmp_path_factory.mktemp("stopped") / "run", toy.make_config(toy_inputs))
    assert toy.train(run_dir, 1, {"KUBETUNE_FAULT": "signal 15:step:7"}) == [errors.PREEMPTED]
    assert checkpoints.steps(run_dir) == [3, 6, 7]
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize("name", ["optimizer.safetensors", "manifest.json", "state.json"])
def test_damage_costs_only_the_newest_checkpoint(
    toy_inputs: Path, tmp_path: Path, stopped: Path, uninterrupted: Any, name: str
) -> None:
    run_dir = shutil.copytree(stopped, tmp_path / "run", symlinks=True)
    damaged = folder_of(run_dir, 7) / name
    os.truncate(damaged, damaged.stat().st_size // 2)
    assert toy.train(run_dir) == [0]
    assert toy.digests(run_dir) == uninterrupted(toy.make_config(toy_inputs), 1)
    assert (run_dir / "checkpoints" / "damaged-step-000007-1").is_dir()
    assert "set aside as damaged-step-000007-1" in toy.log_of(run_dir)


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(
    tmp_path: Path, stopped: Path
) -> None:
    run_dir = shutil.copytree(stopped, tmp_path / "run", symlinks=True)
    for step in (3, 6, 7):
        (folder_of(run_dir, step) / "adapter_model.safetensors").unlink()
    metrics = (run_dir / "metrics.jsonl").read_bytes()
    for _ in range(2):
        assert toy.train(run_dir) == [errors.USER]
    assert "no checkpoint is whole" in toy.log_of(run_dir)
    assert (run_dir / "metrics.jsonl").read_bytes() == metrics
