"""One writer for each run directory, and nobody who goes on writing after its launcher died."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kubetune import errors
from kubetune.base import processes
from kubetune.rundir.metrics import read_metrics
from kubetune.training import worker
from tests import toy
from tests.ranks import started, wait_all, wait_until


def test_a_second_writer_is_refused_and_a_dead_one_is_no_obstacle(
    toy_inputs: Path, tmp_path: Path
) -> None:
    """Without an agent too, as under a torchrun started by hand."""
    run_dir = toy.make_run(tmp_path / "run", toy.make_config(toy_inputs, {"max_steps": 5}))
    with started(worker.main, 1, [str(run_dir)], environ={"KUBETUNE_FAULT": "hang:step:5"}) as (
        first,
    ):
        wait_until(lambda: len(read_metrics(run_dir)) == 5)  # four steps and an evaluation
        before = (run_dir / "metrics.jsonl").read_bytes()
        with started(worker.main, 1, [str(run_dir)]) as (second,):
            assert wait_all([second]) == [errors.ENVIRONMENT]
        assert f"is locked by process {first.pid}" in toy.log_of(run_dir)
        assert not (run_dir / "logs" / "rank-0.exit.json").exists()
        assert (run_dir / "metrics.jsonl").read_bytes() == before
        first.kill()
        assert wait_all([first]) == [-signal.SIGKILL]
    assert toy.train(run_dir) == [0]


@pytest.mark.slow
def test_no_rank_survives_its_launcher(toy_inputs: Path, tmp_path: Path) -> None:
    """The real launcher, agent and torchrun, killed while both ranks train."""
    config = toy.make_config(
        toy_inputs, {"max_steps": 100_000, "save_steps": 100_000}, compute={"processes": 2}
    )
    run_dir = toy.make_run(tmp_path / "run", config, 2)
    with subprocess.Popen(
        [sys.executable, "-m", "kubetune.agent", str(run_dir)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as agent:
        metrics = run_dir / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.stat().st_size)
        below = toy.descendants(agent.pid)
        agent.kill()
    assert len(below) >= 3
    wait_until(lambda: not any(processes.is_alive(pid) for pid in below))
