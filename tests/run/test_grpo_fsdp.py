"""`task: grpo` with a sharded model: the same answers, losses and gradients as one rank has; resumed bit for bit."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from kubetune import errors
from kubetune.config.schema import Config, RewardConfig
from kubetune.rundir import metrics
from kubetune.training.rollouts import rollout_records
from tests import toy
from tests.run.test_grpo import config_of

slow = pytest.mark.slow
SEVERAL: dict[str, Any] = {"num_iterations": 2, "steps_per_generation": 2, "beta": 0.05}


def sharded(
    inputs: Path, *, full: bool, steps: int = 2, settings: dict[str, Any] | None = None
) -> Config:
    training = {
        "max_steps": steps, "eval_steps": steps, "save_steps": 1, "parallelism": "fsdp", "learning_rate": 1e-3,
    }  # fmt: skip
    config = config_of(inputs, training, **(settings or {}))
    return config.model_copy(update={"lora": None}) if full else config


def numbers_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return what steps say of the loss, its gradient and the answers."""
    names = ("loss", "grad_norm", "reward", "kl", "sampling_difference", "completion_length")
    lines = []
    for line in metrics.read_metrics(run_dir):
        if "loss" in line:
            lines.append({name: line[name] for name in names if line.get(name) is not None})
    return lines


@pytest.mark.parametrize(
    ("full", "ranks", "settings"),
    [
        (True, 2, {}),
        pytest.param(False, 3, SEVERAL, marks=slow),
        pytest.param(True, 3, SEVERAL, marks=slow),
        pytest.param(False, 2, {}, marks=slow),
    ],
)
def test_slices_draw_and_learn_as_one_rank_does(
    inputs: Path, tmp_path: Path, full: bool, ranks: int, settings: dict[str, Any]
) -> None:
    config = sharded(inputs, full=full, settings=settings)
    of_one_rank = toy.finished(tmp_path / "1", config)
    others = toy.finished(tmp_path / "others", config, ranks)
    assert rollout_records.read_groups(of_one_rank, 0) == rollout_records.read_groups(others, 0)
    for ours, theirs in zip(numbers_of(others), numbers_of(of_one_rank), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6, rel=1e-6)
        assert ours["sampling_difference"] <= 1e-6 or settings


@slow
def test_answers_that_teach_nothing_keep_sharded_ranks_in_step(
    inputs: Path, tmp_path: Path
) -> None:
    config = sharded(inputs, full=True, steps=1)
    config = config.model_copy(update={"rewards": (RewardConfig(name="contains"),)})
    run_dir = toy.finished(tmp_path / "run", config, 2)
    (line,) = [line for line in metrics.read_metrics(run_dir) if "reward" in line]
    assert line["zero_variance"] == 1.0
    assert line["grad_norm"] == 0.0


@slow
@pytest.mark.parametrize("point", ["generation", "reward", "micro-batch", "commit.part"])
def test_a_killed_rank_of_a_sharded_run_loses_nothing(
    inputs: Path, tmp_path: Path, point: str
) -> None:
    config = sharded(inputs, full=True, steps=3)
    whole = toy.digests(toy.finished(tmp_path / "whole", config, 2))
    run_dir = toy.make_run(tmp_path / "run", config, 2)
    codes = toy.train(run_dir, 2, {"KUBETUNE_FAULT": f"signal 9:{point}:2:1"})
    assert codes == [errors.LOST_PEER, -signal.SIGKILL]
    assert toy.train(run_dir, 2) == [0, 0]
    assert toy.digests(run_dir) == whole


@slow
def test_another_number_of_ranks_goes_on_from_slices(inputs: Path, tmp_path: Path) -> None:
    config = sharded(inputs, full=True, steps=4)
    run_dir = toy.make_run(tmp_path / "run", config, 2)
    environ = {"KUBETUNE_FAULT": f"signal {signal.SIGTERM.value}:step:3:1"}
    assert toy.train(run_dir, 2, environ) == [errors.PREEMPTED] * 2
    toy.make_run(run_dir, config, 1)
    assert toy.train(run_dir) == [0]
    whole = toy.finished(tmp_path / "whole", config)
    assert toy.losses(run_dir) == pytest.approx(toy.losses(whole), abs=1e-5)
