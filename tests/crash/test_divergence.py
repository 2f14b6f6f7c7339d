"""Numbers that are not finite, on one rank only: all stop before the update and name the step and the rows.

And a loss that is finite, but runs away: the run ends where its file says how high is too high, else it tells of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from kubetune import errors
from kubetune.cli.local.watch import look_here
from kubetune.config.schema import Config
from kubetune.data.prepared.prepare import prepare
from kubetune.models import loading
from kubetune.reporting.reading import read_run
from kubetune.rundir import checkpoints, exit_status
from kubetune.training import worker
from tests import toy
from tests.ranks import started, wait_all, wait_until

POISON = "🙂"


@pytest.fixture
def poisoned(toy_inputs: Path, tmp_path: Path) -> tuple[Config, list[int]]:
    """Return a run, and tokens that only one of its rows has."""
    train = tmp_path / "train.jsonl"
    lines = (toy_inputs / "train.jsonl").read_text().splitlines(keepends=True)
    lines[30] = lines[30].replace('"prompt": "', f'"prompt": "{POISON} ')
    train.write_text("".join(lines))
    config = toy.make_config(toy_inputs, {"save_steps": 1}, data={"train": str(train)})
    rows = prepare(config).train
    inside = set(rows.row(30)[0].tolist()).difference(
        *(rows.row(i)[0].tolist() for i in range(len(rows)) if i != 30)
    )
    return config, sorted(inside)


def train_with_nan(run_dir: str, tokens: list[int]) -> int:
    """Train with a model that knows some tokens as NaN. Files with such weights are refused, so it gets them in memory."""
    load = loading.load_pretrained

    def poison(*args: Any, **settings: Any) -> nn.Module:
        model = load(*args, **settings)
        with torch.no_grad():
            model.get_input_embeddings().weight[tokens] = torch.nan
        return model

    with patch.object(loading, "load_pretrained", poison):
        return worker.main([run_dir])


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_poisoned_row_stops_all_ranks_before_the_update(
    tmp_path: Path, poisoned: tuple[Config, list[int]], world_size: int
) -> None:
    config, tokens = poisoned
    run_dir = toy.make_run(tmp_path / "run", config, world_size)
    with started(train_with_nan, world_size, str(run_dir), tokens) as processes:
        assert wait_all(processes) == [errors.DIVERGED] * world_size
    newest = checkpoints.find(run_dir)
    assert newest is not None
    step = checkpoints.load_state(newest).step
    log = toy.log_of(run_dir)
    assert f"step {step + 1}: loss nan" in log
    assert "prepared rows [" in log
    rows = log.partition("prepared rows [")[2].partition("]")[0]
    assert "30" in rows.split(", ")
    records = log.partition(f"which are {tmp_path / 'train.jsonl'} records ")[2].partition(".")[0]
    assert "31" in records.split(", ")  # the line in the file
    for path in newest.glob("*.safetensors"):
        assert all(np.isfinite(tensor.float().numpy()).all() for tensor in load_file(path).values())
    assert len(toy.losses(run_dir)) == step


RUNAWAY = {
    "learning_rate": 5.0,
    "warmup_steps": 4,
    "save_steps": 1,
    "lr_scheduler_type": "constant",
}


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_loss_above_the_threshold_for_so_many_steps_ends_the_run(
    toy_inputs: Path, tmp_path: Path, world_size: int
) -> None:
    first = 20.0  # above what a model that knows nothing has
    watched = {**RUNAWAY, "loss_watchdog_threshold": first, "loss_watchdog_patience": 2}
    config = toy.make_config(toy_inputs, watched, lora=None, data={"eval": 0})
    run_dir = toy.make_run(tmp_path / "run", config, world_size)
    assert toy.train(run_dir, world_size) == [errors.DIVERGED] * world_size
    losses = toy.losses(run_dir)
    assert (
        losses[-1] > first >= max(losses[:-1])
    )  # the second such step moved no weights, and has no line
    log = toy.log_of(run_dir)
    good = len(losses) - 1
    assert (
        f"step {len(losses)}: loss {losses[-1]:.4g} is above training.loss_watchdog_threshold (20): 1 of 2"
        in log
    )
    assert "as in 2 steps in a row (training.loss_watchdog_patience)" in log
    assert f"the checkpoint of step {good} is kept" in log
    assert max(checkpoints.steps(run_dir)) == good


@pytest.mark.slow
def test_steps_above_the_threshold_are_counted_over_a_stop(
    toy_inputs: Path, tmp_path: Path
) -> None:
    watched = {"max_steps": 150, "loss_watchdog_threshold": 1e-9, "loss_watchdog_patience": 120}
    run_dir = toy.make_run(tmp_path / "run", toy.make_config(toy_inputs, watched, data={"eval": 0}))
    with started(worker.main, 1, [str(run_dir)]) as processes:
        wait_until(lambda: len(toy.losses(run_dir)) > 1)
        for process in processes:
            process.terminate()
        assert wait_all(processes) == [errors.PREEMPTED]
    stopped = len(toy.losses(run_dir))
    assert 1 < stopped < 119
    assert toy.train(run_dir) == [errors.DIVERGED]
    assert len(toy.losses(run_dir)) == 119  # the last one of 120 moved no weights, and has no line
    assert max(checkpoints.steps(run_dir)) == stopped


@pytest.mark.slow
def test_a_run_whose_loss_ran_away_says_so_at_its_end(toy_inputs: Path, tmp_path: Path) -> None:
    tracked = {"lora": None, "data": {"eval": 0}, "tracking": {"tensorboard": True}}
    run_dir = toy.finished(tmp_path / "run", toy.make_config(toy_inputs, RUNAWAY, **tracked))
    assert b"the loss ran away: " in b"".join(
        path.read_bytes() for path in (run_dir / "tensorboard").iterdir()
    )
    assert json.loads((run_dir / "report.json").read_text())["loss_runaway"]["last"] > 20
    status = exit_status.read_rank_exit_statuses(run_dir)[0]
    assert (status.code, status.reason[:28]) == (0, "done, but the loss ran away:")
    assert "[RESULT] WARNING: the loss ran away: " in toy.log_of(run_dir)
    assert [incident.what for incident in read_run(run_dir).incidents] == ["the loss ran away"]
    exit_status.write_exit_status(run_dir, status)
    assert look_here(run_dir).why == status.reason
    assert toy.train(run_dir) == [0]  # and says so again where nothing is left to do
    assert exit_status.read_rank_exit_statuses(run_dir)[0].reason == status.reason
