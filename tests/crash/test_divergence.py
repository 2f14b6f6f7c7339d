"""Numbers that are not finite, on one rank only: all stop before the update and name the step and the rows."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kubetune import checkpoint, errors
from kubetune.config.schema import Config
from kubetune.data.prepare import prepare
from tests import toy

POISON = "🙂"


@pytest.fixture
def poisoned(toy_inputs: Path, tmp_path: Path) -> Config:
    """A model that knows one token as NaN, and data with it in one row."""
    model, train = shutil.copytree(toy_inputs / "model", tmp_path / "model"), tmp_path / "train.jsonl"
    lines = (toy_inputs / "train.jsonl").read_text().splitlines(keepends=True)
    lines[30] = lines[30].replace('"prompt": "', f'"prompt": "{POISON} ')
    train.write_text("".join(lines))
    config = toy.make_config(toy_inputs, {"save_steps": 1}, model=str(model), data={"train": str(train)})
    rows = prepare(config).train
    inside = set(rows.row(30)[0].tolist()).difference(*(rows.row(i)[0].tolist() for i in range(len(rows)) if i != 30))
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][sorted(inside)] = torch.nan
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return config


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_poisoned_row_stops_all_ranks_before_the_update(tmp_path: Path, poisoned: Config, world_size: int) -> None:
    run_dir = toy.make_run(tmp_path / "run", poisoned, world_size)
    assert toy.train(run_dir, world_size) == [errors.DIVERGED] * world_size
    newest = checkpoint.find(run_dir)
    assert newest is not None
    step = checkpoint.load_state(newest).step
    log = (run_dir / "logs" / "rank-0.log").read_text()
    assert f"step {step + 1}: loss nan" in log
    assert "prepared rows [" in log
    rows = log.partition("prepared rows [")[2].partition("]")[0]
    assert "30" in rows.split(", ")
    records = log.partition(f"which are {tmp_path / 'train.jsonl'} records ")[2].partition(".")[0]
    assert "31" in records.split(", ")  # the line in the file
    for path in newest.glob("*.safetensors"):
        assert all(np.isfinite(tensor.float().numpy()).all() for tensor in load_file(path).values())
    assert len(toy.losses(run_dir)) == step
