"""kill -9 at each point of a commit that several ranks write together, or that is written beside the loop."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from kubetune import errors
from kubetune.rundir import checkpoints
from kubetune.rundir.checkpoints import folder_of
from tests import toy

pytestmark = pytest.mark.slow
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"lora": {"r": 4, "dropout": 0.1}},
    "full": {"lora": None},
}
POINTS = [
    # (point, how often it is passed, step that must be safe by then)
    pytest.param("micro-batch", 8, 3, id="accumulation"),
    pytest.param("commit.weights", 2, 3, id="weights written"),
    pytest.param("commit.written", 2, 3, id="all but the manifest written"),
    pytest.param("write manifest.json", 2, 3, id="manifest half written"),
    pytest.param("commit.sealed", 2, 3, id="sealed, not named"),
    pytest.param("commit.renamed", 2, 6, id="named"),
    pytest.param("link", 3, 6, id="before `last` moves"),
    pytest.param("remove", 1, 12, id="half deleted"),
    pytest.param("commit.renamed", 5, 14, id="named, the last one"),
]


@pytest.mark.parametrize(("point", "nth", "safe"), POINTS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("parallelism", "async_save"),
    [("fsdp", False), ("ddp", True), ("fsdp", True)],
    ids=["fsdp", "async", "fsdp async"],
)
def test_killed_at_each_point(
    toy_inputs: Path,
    tmp_path: Path,
    uninterrupted: Any,
    parallelism: str,
    async_save: bool,
    method: str,
    point: str,
    nth: int,
    safe: int,
) -> None:
    world_size = 2 if parallelism == "fsdp" else 1
    config, plain = (
        toy.make_config(
            toy_inputs, {"parallelism": parallelism, "async_save": is_async}, **METHODS[method]
        )
        for is_async in (async_save, False)
    )
    run_dir = toy.make_run(tmp_path / "run", config, world_size)
    codes = toy.train(run_dir, world_size, {"KUBETUNE_FAULT": f"signal 9:{point}:{nth}"})
    assert codes == [-signal.SIGKILL, errors.LOST_PEER][:world_size]
    newest = checkpoints.find(run_dir)
    if (
        point != "micro-batch"
    ):  # whose number says little: two ranks share them, and saves go on beside the loop
        assert newest == folder_of(run_dir, safe)
    assert toy.train(run_dir, world_size) == [0] * world_size
    assert toy.digests(run_dir) == uninterrupted(plain, world_size)
    assert not list(run_dir.glob("checkpoints/.*.tmp"))


@pytest.mark.parametrize("async_save", [False, True], ids=["between steps", "beside the loop"])
def test_the_rank_that_only_writes_slices_is_killed(
    toy_inputs: Path, tmp_path: Path, uninterrupted: Any, async_save: bool
) -> None:
    config, plain = (
        toy.make_config(toy_inputs, {"parallelism": "fsdp", "async_save": is_async}, lora=None)
        for is_async in (async_save, False)
    )
    run_dir = toy.make_run(tmp_path / "run", config, 2)
    assert toy.train(run_dir, 2, {"KUBETUNE_FAULT": "signal 9:commit.part:2:1"}) == [
        errors.LOST_PEER,
        -signal.SIGKILL,
    ]
    assert checkpoints.find(run_dir) == folder_of(run_dir, 3)
    assert toy.train(run_dir, 2) == [0, 0]
    assert toy.digests(run_dir) == uninterrupted(plain, 2)
