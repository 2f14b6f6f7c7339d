"""The rehearsal before step 1: it changes no bit of the run, leaves nothing behind, and says what does not fit."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from kubetune import errors
from kubetune.distributed.process_group import World
from kubetune.plan.costs import DataTotals, DeviceFacts, RunWeights, costs_of
from kubetune.plan.plan import make_plan
from kubetune.rundir import metrics
from kubetune.training import worker
from kubetune.training.start.memory_budget import MemoryBudget
from kubetune.training.start.memory_trials import explaining_shortage
from tests import toy
from tests.ranks import started, wait_all

slow = pytest.mark.slow


ASKED = {"generate": {"metric": "contains", "max_new_tokens": 4}}


def hidden(run_dir: Path) -> list[Path]:
    return [path for path in run_dir.rglob("*") if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("world_size", "training", "sections"),
    [
        pytest.param(1, {}, {"lora": {"r": 4, "dropout": 0.2}}, id="dropout"),
        pytest.param(2, {}, {}, id="two ranks", marks=slow),
        pytest.param(
            2,
            {"parallelism": "fsdp"},
            {"lora": None, "evaluation": ASKED},
            id="sharded",
            marks=slow,
        ),
        pytest.param(
            1,
            {"async_save": True},
            {"lora": None, "model_dtype": "bfloat16"},
            id="bf16",
            marks=slow,
        ),
    ],
)
def test_a_preflight_changes_no_bit_and_leaves_nothing(
    inputs: Path,
    tmp_path: Path,
    world_size: int,
    training: dict[str, Any],
    sections: dict[str, Any],
) -> None:
    sections = dict(sections)
    if dtype := sections.pop("model_dtype", None):
        sections["model"] = {"path": str(inputs / "model"), "dtype": dtype}
    training = {"max_steps": 4, **training}
    plain = toy.finished(
        tmp_path / "plain", toy.make_config(inputs, training, **sections), world_size
    )
    config = toy.make_config(inputs, {**training, "preflight": True}, **sections)
    rehearsed = toy.finished(tmp_path / "probed", config, world_size)
    assert toy.digests(plain) == toy.digests(rehearsed)
    assert {p.name for p in (plain / "checkpoints").iterdir()} == {
        p.name for p in (rehearsed / "checkpoints").iterdir()
    }
    assert not hidden(rehearsed)
    report = json.loads((rehearsed / "report.json").read_text())["preflight"]
    assert report["measured_bytes"] > 0
    assert report["forecast_bytes"] > 0
    assert report["checkpoint_bytes"] > 1000
    assert report["seconds"].keys() == {
        "batch",
        "evaluation",
        "save",
        *(["answers"] if "evaluation" in sections else []),
    }
    assert "preflight: peak memory" in toy.log_of(rehearsed)
    assert json.loads((plain / "report.json").read_text())["preflight"] is None


@slow
def test_a_kill_in_its_save_leaves_nothing_and_what_goes_on_is_not_rehearsed_again(
    inputs: Path, tmp_path: Path
) -> None:
    config = toy.make_config(inputs, {"max_steps": 4, "preflight": True})
    run_dir = toy.make_run(tmp_path / "killed", config)
    assert toy.train(run_dir, environ={"KUBETUNE_FAULT": "signal 9:commit.sealed"}) == [
        -signal.SIGKILL
    ]
    assert [path.name[:11] for path in hidden(run_dir)][:1] == [".preflight."]
    stop = {"KUBETUNE_FAULT": f"signal {signal.SIGTERM.value}:step:3"}
    assert toy.train(run_dir, environ=stop) == [errors.PREEMPTED]
    assert not hidden(run_dir)
    assert toy.train(run_dir) == [0]
    assert "no preflight: this start goes on from step" in toy.log_of(run_dir)
    plain = toy.finished(tmp_path / "plain", toy.make_config(inputs, {"max_steps": 4}))
    assert toy.digests(run_dir) == toy.digests(plain)


def test_what_does_not_fit_ends_before_step_1_with_what_would(inputs: Path, tmp_path: Path) -> None:
    config = toy.make_config(inputs, {"preflight": True}, compute={"memory": "200Mi"})
    run_dir = toy.make_run(tmp_path / "run", config)
    assert toy.train(run_dir) == [errors.ENVIRONMENT]
    assert metrics.read_metrics(run_dir) == []
    assert not list((run_dir / "checkpoints").iterdir())
    status = json.loads((run_dir / "logs" / "rank-0.exit.json").read_text())
    assert "there are 200 MiB (compute.memory of each process)" in status["reason"]
    assert "no single change would make it fit" in status["reason"]
    assert "which is not enough" in toy.log_of(run_dir), "said before anything was tried"


def train_in_little(run_dir: str, mebibytes: int) -> int:
    """Train with no more address space than there is now, and a little."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + mebibytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return worker.main([run_dir])


def test_memory_that_ran_out_is_no_bug_of_ours(inputs: Path) -> None:
    config = toy.make_config(
        inputs, {"per_device_train_batch_size": 2}, compute={"memory": "450Mi"}
    )
    data = DataTotals(None, None)
    costs = costs_of(config, make_plan(config), data, DeviceFacts(None, None), RunWeights(None))
    budget = MemoryBudget(config, costs, World().device)
    message = r"rank 0 ran out of memory \(.*can't allocate memory.*\); there are 450 MiB .*What was saved is good"
    with (
        pytest.raises(errors.EnvironmentFault, match=message),
        explaining_shortage(budget, rank=0),
    ):
        torch.empty(10**15, dtype=torch.uint8)


@slow
@pytest.mark.parametrize("is_rehearsed", [True, False])
def test_memory_that_runs_out_is_explained(
    inputs: Path, tmp_path: Path, is_rehearsed: bool
) -> None:
    with (tmp_path / "long.jsonl").open("w") as file:
        for number in range(4):
            file.write(
                json.dumps({"prompt": f"{number} " + "the lazy dog " * 5000, "completion": " what"})
                + "\n"
            )
    data = {"train": str(tmp_path / "long.jsonl"), "eval": None, "max_length": 100_000}
    config = toy.make_config(inputs, {"preflight": is_rehearsed, "global_batch_size": 2}, data=data)
    run_dir = toy.make_run(tmp_path / "run", config)
    with started(train_in_little, 1, str(run_dir), 500) as processes:
        codes = wait_all(processes)
    assert codes == [errors.ENVIRONMENT], toy.log_of(run_dir)
    reason = json.loads((run_dir / "logs" / "rank-0.exit.json").read_text())["reason"]
    assert "ran out of memory" in reason
    assert "fit" in reason
    assert not hidden(run_dir)
