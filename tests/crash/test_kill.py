"""kill -9 at any point: the run that goes on ends bit for bit as one that was never killed.

Also at each point of a commit that several ranks write together, or that is written beside the loop.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from kubetune import errors
from kubetune.rundir import checkpoints
from kubetune.training import worker
from tests import toy
from tests.ranks import started, wait_all, wait_until

LORA: dict[str, Any] = {"lora": {"r": 4, "dropout": 0.1}}
FULL: dict[str, Any] = {"lora": None}
KILLED = -signal.SIGKILL

slow = pytest.mark.slow
POINTS = [
    # (point, how often it is passed before, steps that must be safe by then)
    pytest.param("step", 1, 0, id="before the first step", marks=slow),
    pytest.param("micro-batch", 8, 3, id="accumulation", marks=slow),
    pytest.param("evaluation", 4, 3, id="evaluation", marks=slow),
    pytest.param("commit.weights", 2, 3, id="weights written", marks=slow),
    pytest.param("commit.written", 2, 3, id="all but the manifest written", marks=slow),
    pytest.param("write manifest.json", 2, 3, id="manifest half written"),
    pytest.param("commit.sealed", 2, 3, id="sealed, not named", marks=slow),
    pytest.param("commit.renamed", 2, 6, id="named", marks=slow),
    pytest.param("link", 3, 6, id="before `last` moves", marks=slow),
    pytest.param("link", 4, 6, id="before `best` moves", marks=slow),
    pytest.param("remove", 1, 12, id="half deleted", marks=slow),
    pytest.param("commit.renamed", 5, 14, id="named, the last one", marks=slow),
]

# Settings with which several ranks write a checkpoint together, or one is written beside the loop.
ELSEWHERE: dict[str, dict[str, Any]] = {
    "fsdp": {"parallelism": "fsdp"},
    "async": {"async_save": True},
    "fsdp async": {"parallelism": "fsdp", "async_save": True},
}


def kill_at(run_dir: Path, world_size: int, point: str, nth: int, rank: int = 0) -> list[int]:
    return toy.train(run_dir, world_size, {"KUBETUNE_FAULT": f"signal 9:{point}:{nth}:{rank}"})


@pytest.mark.parametrize(("point", "nth", "safe"), POINTS)
def test_killed_at_each_point(
    toy_inputs: Path, tmp_path: Path, uninterrupted: Any, point: str, nth: int, safe: int
) -> None:
    config = toy.make_config(toy_inputs, **LORA)
    run_dir = toy.make_run(tmp_path / "run", config)
    assert kill_at(run_dir, 1, point, nth) == [KILLED]
    newest = checkpoints.find(run_dir)
    assert newest == (checkpoints.folder_of(run_dir, safe) if safe else None)
    assert toy.train(run_dir) == [0]
    assert toy.digests(run_dir) == uninterrupted(config, 1)
    assert os.readlink(run_dir / "checkpoints" / "last") == "step-000014"
    assert not list(run_dir.glob("checkpoints/.*.tmp"))


@slow
@pytest.mark.parametrize(("point", "nth", "safe"), [point.values for point in POINTS])
@pytest.mark.parametrize("sections", [LORA, FULL], ids=["lora", "full"])
@pytest.mark.parametrize("training", ELSEWHERE.values(), ids=ELSEWHERE)
def test_killed_at_each_point_of_a_commit_elsewhere(
    toy_inputs: Path,
    tmp_path: Path,
    uninterrupted: Any,
    training: dict[str, Any],
    sections: dict[str, Any],
    point: str,
    nth: int,
    safe: int,
) -> None:
    world_size = 2 if "parallelism" in training else 1
    config = toy.make_config(toy_inputs, training, **sections)
    plain = toy.make_config(toy_inputs, {**training, "async_save": False}, **sections)
    run_dir = toy.make_run(tmp_path / "run", config, world_size)
    assert kill_at(run_dir, world_size, point, nth) == [KILLED, errors.LOST_PEER][:world_size]
    # The number of a micro-batch says little: two ranks share them, and saves go on beside the loop.
    if point.startswith(("commit.", "write ", "link", "remove")):
        assert checkpoints.find(run_dir) == checkpoints.folder_of(run_dir, safe)
    assert toy.train(run_dir, world_size) == [0] * world_size
    assert toy.digests(run_dir) == uninterrupted(plain, world_size)
    assert not list(run_dir.glob("checkpoints/.*.tmp"))


@slow
@pytest.mark.parametrize("async_save", [False, True], ids=["between steps", "beside the loop"])
def test_the_rank_that_only_writes_slices_is_killed(
    toy_inputs: Path, tmp_path: Path, uninterrupted: Any, async_save: bool
) -> None:
    training = {"parallelism": "fsdp", "async_save": async_save}
    config = toy.make_config(toy_inputs, training, **FULL)
    plain = toy.make_config(toy_inputs, {**training, "async_save": False}, **FULL)
    run_dir = toy.make_run(tmp_path / "run", config, 2)
    assert kill_at(run_dir, 2, "commit.part", 2, 1) == [errors.LOST_PEER, KILLED]
    assert checkpoints.find(run_dir) == checkpoints.folder_of(run_dir, 3)
    assert toy.train(run_dir, 2) == [0, 0]
    assert toy.digests(run_dir) == uninterrupted(plain, 2)


def test_what_a_kill_left_half_written_is_gone_after_the_next_start(
    toy_inputs: Path, tmp_path: Path
) -> None:
    run_dir = toy.make_run(tmp_path / "run", toy.make_config(toy_inputs, **LORA))
    assert kill_at(run_dir, 1, "write proof_rows.safetensors", 1) == [KILLED]
    (half,) = run_dir.glob(".proof_rows.safetensors.*.tmp")
    os.utime(half, (0, 0))  # what is younger than a second may be somebody's who has just begun
    assert toy.train(run_dir) == [0]
    assert (run_dir / "proof_rows.safetensors").is_file()
    assert not list(run_dir.rglob(".*.tmp"))


@pytest.mark.parametrize(
    ("sections", "point", "nth", "rank"),
    [
        pytest.param(LORA, "micro-batch", 9, 1, id="lora, rank 1"),
        pytest.param(FULL, "commit.sealed", 2, 0, id="full, rank 0", marks=slow),
        pytest.param(FULL, "step", 8, 1, id="full, rank 1", marks=slow),
        pytest.param(LORA, "commit.renamed", 3, 0, id="lora, rank 0", marks=slow),
    ],
)
def test_one_of_two_ranks_killed(
    toy_inputs: Path,
    tmp_path: Path,
    uninterrupted: Any,
    sections: Any,
    point: str,
    nth: int,
    rank: int,
) -> None:
    config = toy.make_config(toy_inputs, **sections)
    run_dir = toy.make_run(tmp_path / "run", config, 2)
    codes = kill_at(run_dir, 2, point, nth, rank)
    assert (codes[rank], codes[1 - rank]) == (KILLED, errors.LOST_PEER)
    assert toy.train(run_dir, 2) == [0, 0]
    assert toy.digests(run_dir) == uninterrupted(config, 2)


@pytest.mark.slow
def test_ten_interruptions_in_one_run(toy_inputs: Path, tmp_path: Path, uninterrupted: Any) -> None:
    """Two before the first save, several in one epoch, one at its very edge, one in the last save."""
    config = toy.make_config(toy_inputs, {"save_steps": 1}, **LORA)
    run_dir = toy.make_run(tmp_path / "run", config)
    faults = [
        ("step", 1), ("commit.sealed", 1), ("step", 2), ("micro-batch", 5), ("commit.renamed", 1), ("step", 3),
        ("link", 2), ("commit.written", 2), ("evaluation", 1), ("step", 3),
    ]  # fmt: skip
    reached = []
    for point, nth in faults:
        assert kill_at(run_dir, 1, point, nth) == [KILLED]
        reached.append(max(checkpoints.steps(run_dir), default=0))
    assert reached == sorted(reached)
    assert toy.STEPS_PER_EPOCH in reached
    assert toy.train(run_dir) == [0]
    assert len(toy.losses(run_dir)) == 2 * toy.STEPS_PER_EPOCH
    assert toy.digests(run_dir) == uninterrupted(config, 1)


def test_killed_while_it_saves_after_sigterm(
    toy_inputs: Path, tmp_path: Path, uninterrupted: Any
) -> None:
    """As when the grace time is too short: the checkpoint before is used."""
    config = toy.make_config(toy_inputs, **LORA)
    run_dir = toy.make_run(tmp_path / "run", config)
    environ = {"KUBETUNE_FAULT": "hang:commit.written:2"}
    with started(worker.main, 1, [str(run_dir)], environ=environ) as (process,):
        wait_until(lambda: any(run_dir.glob("checkpoints/.step-000006.*.tmp/state.json")))
        process.terminate()
        process.kill()
        assert wait_all([process]) == [KILLED]
    assert checkpoints.find(run_dir) == checkpoints.folder_of(run_dir, 3)
    assert toy.train(run_dir) == [0]
    assert toy.digests(run_dir) == uninterrupted(config, 1)
