"""A full disk: exit code 3 with what to do, every earlier checkpoint whole, and the run goes on when there is room."""

from __future__ import annotations

import errno
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kubetune import errors
from kubetune.base import files
from kubetune.rundir import checkpoints
from kubetune.rundir.checkpoints import folder_of
from kubetune.training import worker
from tests import toy
from tests.ranks import started, wait_all

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("point", "nth", "safe"),
    [
        ("commit.weights", 2, 3),
        pytest.param("commit.written", 2, 3, marks=slow),
        pytest.param("write manifest.json", 2, 3, marks=slow),  # of the second checkpoint
        pytest.param("commit.sealed", 2, 3, marks=slow),
        pytest.param("commit.renamed", 2, 6, marks=slow),
        pytest.param("link", 3, 6, marks=slow),
        pytest.param("remove", 1, 12, marks=slow),
    ],
)
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=slow)])
def test_no_space_at_each_point(
    toy_inputs: Path,
    tmp_path: Path,
    uninterrupted: Any,
    world_size: int,
    point: str,
    nth: int,
    safe: int,
) -> None:
    config = toy.make_config(toy_inputs)
    run_dir = toy.make_run(tmp_path / "run", config, world_size)
    codes = toy.train(
        run_dir, world_size, {"KUBETUNE_FAULT": f"error {errno.ENOSPC}:{point}:{nth}"}
    )
    assert codes == [errors.ENVIRONMENT] * world_size
    log = toy.log_of(run_dir)
    assert "No space left on device (" in log
    assert re.search(
        r"bytes free\); free some space and run the same command again; a checkpoint takes [\d,]+ bytes",
        log,
    )
    assert checkpoints.find(run_dir) == folder_of(run_dir, safe)
    assert toy.train(run_dir, world_size) == [0] * world_size
    assert toy.digests(run_dir) == uninterrupted(config, world_size)


def train_with_small_files(run_dir: str, largest: int) -> int:
    """Train where no file may grow beyond `largest` bytes: a limit of the kernel, met inside the libraries too."""
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (largest, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    )
    return worker.main([run_dir])


@slow
@pytest.mark.parametrize(
    ("sections", "largest"),
    [pytest.param({}, 60_000, marks=slow), ({"lora": None}, 200_000)],
    ids=["lora", "full"],
)
def test_a_write_that_fails_inside_a_library(
    toy_inputs: Path, tmp_path: Path, uninterrupted: Any, sections: dict[str, Any], largest: int
) -> None:
    config = toy.make_config(toy_inputs, **sections)
    run_dir = toy.make_run(tmp_path / "run", config)
    assert toy.train(run_dir, 1, {"KUBETUNE_FAULT": "signal 15:step:4"}) == [errors.PREEMPTED]
    with started(train_with_small_files, 1, str(run_dir), largest) as processes:
        assert wait_all(processes) == [errors.ENVIRONMENT]
    assert "File too large" in toy.log_of(run_dir)
    assert checkpoints.find(run_dir) == folder_of(run_dir, 4)
    assert not list(run_dir.glob("checkpoints/.*.tmp"))
    assert toy.train(run_dir) == [0]
    assert toy.digests(run_dir) == uninterrupted(config, 1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system of 2 MB, where this user may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_cannot_hold_the_checkpoints_is_refused_at_once(
    toy_inputs: Path, small_disk: Path
) -> None:
    run_dir = toy.make_run(small_disk / "run", toy.make_config(toy_inputs, lora=None))
    assert toy.train(run_dir) == [errors.ENVIRONMENT]
    match = re.search(
        r"4 checkpoints of ([\d,]+) bytes need ([\d,]+) bytes, ([\d,]+) are free",
        toy.log_of(run_dir),
    )
    assert match is not None
    checkpoint_bytes, needed, free = (int(number.replace(",", "")) for number in match.groups())
    assert free < 2_097_152 < 4 * checkpoint_bytes == needed
    assert not (run_dir / "metrics.jsonl").exists()


@slow
def test_a_disk_without_a_single_byte_hides_neither_code_nor_cause(
    toy_inputs: Path, small_disk: Path
) -> None:
    """Not even the log or the rank's last word can be written."""
    run_dir = toy.make_run(small_disk / "run", toy.make_config(toy_inputs))
    with started(
        worker.main, 1, [str(run_dir)], environ={"KUBETUNE_FAULT": "signal 19:step:3"}
    ) as ranks:
        toy.wait_until_stopped(ranks[0])
        with suppress(OSError), (small_disk / "other").open("wb", buffering=0) as other:
            while other.write(bytes(4096)):
                pass
        toy.go_on(ranks[0])
        assert wait_all(ranks) == [errors.ENVIRONMENT]
    assert files.free_bytes(small_disk) == 0
    (small_disk / "other").unlink()
    assert toy.train(run_dir) == [0]


@pytest.mark.parametrize(
    ("training", "world_size"),
    [
        ({}, 1),
        pytest.param({"async_save": True}, 1, marks=slow),
        pytest.param({"async_save": True, "parallelism": "fsdp"}, 2, marks=slow),
    ],
    ids=["", "beside the loop", "sharded, beside the loop"],
)
def test_a_disk_that_somebody_else_fills(
    toy_inputs: Path,
    small_disk: Path,
    uninterrupted: Any,
    training: dict[str, Any],
    world_size: int,
) -> None:
    config = toy.make_config(toy_inputs, training)
    run_dir = toy.make_run(small_disk / "run", config, world_size)
    fault = {"KUBETUNE_FAULT": "signal 19:link:1"}  # the first checkpoint has just got its name
    with started(worker.main, world_size, [str(run_dir)], environ=fault) as ranks:
        toy.wait_until_stopped(ranks[0])
        with (small_disk / "other").open("wb") as other:
            other.write(bytes(files.free_bytes(small_disk) - 50_000))
        toy.go_on(ranks[0])
        assert wait_all(ranks) == [errors.ENVIRONMENT] * world_size
    match = re.search(
        r"a checkpoint of [\d,]+ bytes need ([\d,]+) bytes, ([\d,]+) are free",
        toy.log_of(run_dir),
    )
    assert match is not None
    needed, free = (int(number.replace(",", "")) for number in match.groups())
    assert free < 50_000 < needed
    assert checkpoints.find(run_dir) == folder_of(run_dir, 3)
    (small_disk / "other").unlink()
    assert shutil.disk_usage(small_disk).free > 1_000_000
    assert toy.train(run_dir, world_size) == [0] * world_size
    assert toy.digests(run_dir) == uninterrupted(config, world_size)
