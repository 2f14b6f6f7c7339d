"""SIGTERM to the first process of a run, as a pod gets it, or to one rank below torchrun: in every phase."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kubetune import errors
from kubetune.base import processes
from kubetune.rundir import checkpoints, exit_status
from tests import toy
from tests.crash.test_stop import much_data
from tests.ranks import wait_until

METHODS: dict[str, dict[str, Any]] = {
    "lora": {"lora": {"r": 4, "dropout": 0.1}},
    "full": {"lora": None},
}


def command(run_dir: Path) -> list[str]:
    return [sys.executable, "-m", "kubetune.agent", str(run_dir)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallelism", "method", "world_size", "point", "nth", "rank", "receiver"),
    [
        ("ddp", "lora", 1, "prepare", 1, 0, "agent"),
        ("ddp", "lora", 1, "micro-batch", 8, 0, "agent"),
        ("ddp", "lora", 2, "prepare", 1, 0, "agent"),
        ("ddp", "lora", 2, "joining", 1, 0, "agent"),  # the other rank waits in init_process_group
        ("ddp", "lora", 2, "joining", 1, 1, "rank"),
        ("ddp", "lora", 2, "starting", 1, 1, "agent"),
        ("ddp", "lora", 2, "starting", 1, 1, "rank"),
        ("ddp", "lora", 2, "step", 1, 1, "agent"),
        ("ddp", "lora", 2, "step", 1, 0, "rank"),
        ("ddp", "lora", 2, "micro-batch", 8, 1, "rank"),
        ("ddp", "lora", 2, "evaluation", 1, 0, "agent"),
        ("ddp", "lora", 2, "evaluation", 1, 1, "rank"),
        ("ddp", "lora", 2, "commit.written", 1, 0, "agent"),
        ("ddp", "lora", 2, "commit.written", 1, 0, "rank"),
        ("fsdp", "full", 2, "joining", 1, 1, "agent"),
        ("fsdp", "full", 2, "micro-batch", 8, 1, "agent"),
        ("fsdp", "full", 2, "commit.part", 1, 0, "agent"),
        ("fsdp", "full", 2, "commit.part", 1, 1, "rank"),
    ],
)
def test_everybody_stops_soon_and_the_next_start_goes_on(
    toy_inputs: Path,
    tmp_path: Path,
    uninterrupted: Any,
    parallelism: str,
    method: str,
    world_size: int,
    point: str,
    nth: int,
    rank: int,
    receiver: str,
) -> None:
    training: dict[str, Any] = {"parallelism": parallelism}
    data: dict[str, Any] = {}
    if point == "prepare":  # with processes of its own, which share the work
        data = much_data(toy_inputs, tmp_path, num_proc=2)
        training = {"max_steps": 4}
    config = toy.make_config(toy_inputs, training, data=data, **METHODS[method])
    run_dir = toy.make_run(tmp_path / "run", config, world_size)
    environ = {**os.environ, "KUBETUNE_FAULT": f"signal 19:{point}:{nth}:{rank}"}
    with subprocess.Popen(command(run_dir), env=environ, stdout=subprocess.DEVNULL) as agent:
        wait_until(lambda: toy.stopped_below(agent.pid))
        everybody = toy.descendants(agent.pid)
        stopped = toy.stopped_below(agent.pid)
        for pid in [agent.pid] if receiver == "agent" else stopped:
            os.kill(pid, signal.SIGTERM)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        assert agent.wait(60) == errors.PREEMPTED
    assert not [pid for pid in everybody if processes.is_alive(pid)]
    status = exit_status.read_exit_status(run_dir)
    assert status is not None
    assert (status.code, status.step or 0) == (
        errors.PREEMPTED,
        max(checkpoints.steps(run_dir), default=0),
    )
    assert (
        subprocess.run(command(run_dir), stdout=subprocess.DEVNULL, check=False).returncode
        == errors.OK
    )
    assert toy.digests(run_dir) == uninterrupted(config, world_size)
