"""One of two ranks is killed, stopped or late, in each phase of a run: it is named in time, and the run goes on."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from kubetune import errors
from kubetune.config.schema import Config
from kubetune.distributed import process_group
from kubetune.rundir import exit_status, heartbeat
from kubetune.rundir.exit_status import Death, ExitStatus
from kubetune.training import worker
from tests import toy
from tests.ranks import started, wait_all, wait_until

# `training.timeout_seconds`; before the ranks have met nothing else ends those who wait for one that died.
PATIENCE, IMPATIENCE = 60.0, 5.0
NOTICED_SECONDS = 30.0
# `training.timeout_seconds` of runs with a stopped rank: longer than loading takes on a crowded machine.
STOPPED_TIMEOUT = 20.0

# What torchrun gives a rank to leave before it kills it.
TORCHRUN_SECONDS = 30.0

Whole = Callable[[Config, int], dict[str, str]]


@dataclass(frozen=True)
class Phase:
    """Where a rank is broken: the point, how often it is passed, by which rank, and what the run is like.

    `noted`: the phase that a rank is in there for the first time; "" where steps have been many.
    """

    point: str
    nth: int = 1
    ranks: tuple[int, ...] = (0, 1)
    sliced: bool = False
    borrows: bool = False
    resumed: bool = False
    noted: str = ""


PHASES = {
    "joining": Phase("joining", noted="joining"),
    "rendezvous": Phase("rendezvous", noted="rendezvous"),
    "starting": Phase("starting", noted="starting"),
    "loading": Phase("loading", noted="loading"),
    "first step": Phase("step", noted="step"),
    "accumulation": Phase("micro-batch", 8),
    "all-reduce": Phase("all-reduce", 6),
    "borrowing a layer": Phase("gather", 40, borrows=True),
    "evaluation": Phase("evaluation", noted="evaluation"),
    "save": Phase("save", noted="save"),
    "save of slices": Phase("commit.part", sliced=True, noted="save"),
    "commit": Phase("commit.sealed", ranks=(0,), noted="save"),
    "commit of slices": Phase("commit.sealed", ranks=(0,), sliced=True, noted="save"),
    "resuming": Phase("resuming", resumed=True, noted="resuming"),
    "report": Phase("report", noted="report"),
}
QUICK = {("all-reduce", 1), ("borrowing a layer", 0)}
TABLE = [
    pytest.param(
        name,
        rank,
        id=f"{name}, rank {rank}",
        marks=() if (name, rank) in QUICK else pytest.mark.slow,
    )
    for name, phase in PHASES.items()
    for rank in phase.ranks
]
SLOW_TABLE = [pytest.param(*row.values, id=row.id, marks=pytest.mark.slow) for row in TABLE]
every_phase = pytest.mark.parametrize(("name", "rank"), TABLE)


@dataclass(frozen=True)
class Broken:
    """A run of two ranks that one of them will harm."""

    config: Config
    run_dir: Path
    phase: Phase
    rank: int

    def start(self, number: int) -> Any:
        """Return the ranks, of which one sends itself this signal when it gets to the point."""
        fault = f"signal {number}:{self.phase.point}:{self.phase.nth}:{self.rank}"
        return started(worker.main, 2, [str(self.run_dir)], environ={"KUBETUNE_FAULT": fault})

    def logs(self) -> str:
        return "".join(path.read_text() for path in (self.run_dir / "logs").glob("rank-*.log"))

    def require_next_start(self, whole: Whole) -> None:
        """Require that the next start ends as a run that nobody disturbed."""
        assert "this is a bug" not in self.logs()
        assert "Traceback" not in self.logs()
        exit_status.clear_exit_statuses(self.run_dir)
        assert toy.train(self.run_dir, 2) == [0, 0]
        assert toy.digests(self.run_dir) == whole(self.config, 2)


@pytest.fixture
def timeout(name: str) -> float:
    return IMPATIENCE if name in ("joining", "rendezvous") else PATIENCE


@pytest.fixture
def broken(toy_inputs: Path, tmp_path: Path, name: str, rank: int, timeout: float) -> Broken:
    phase = PHASES[name]
    parallelism = "fsdp" if phase.sliced else "shard_base" if phase.borrows else "ddp"
    training = {"timeout_seconds": timeout, "parallelism": parallelism}
    config = toy.make_config(toy_inputs, training, lora=None if phase.sliced else {"r": 4})
    run_dir = toy.make_run(tmp_path / "run", config, 2)
    if phase.resumed:
        assert toy.train(run_dir, 2, {"KUBETUNE_FAULT": "signal 9:step:5:0"}) == [
            -signal.SIGKILL,
            errors.LOST_PEER,
        ]
        exit_status.clear_exit_statuses(run_dir)
    return Broken(config, run_dir, phase, rank)


def wait_for_other(ranks: list[ForkServerProcess], rank: int) -> float:
    """Return the seconds until the other rank has given up."""
    began = time.monotonic()
    assert wait_all([ranks[1 - rank]], 2 * NOTICED_SECONDS) == [errors.LOST_PEER]
    return time.monotonic() - began


@every_phase
def test_a_killed_rank_is_named_and_the_next_start_goes_on(
    broken: Broken, uninterrupted: Whole, name: str, rank: int
) -> None:
    with broken.start(signal.SIGKILL) as ranks:
        assert wait_all([ranks[rank]]) == [-signal.SIGKILL]
        seen = time.time()
        seconds = wait_for_other(ranks, rank)
    assert seconds < NOTICED_SECONDS
    deaths = [Death(rank, -signal.SIGKILL, seen), Death(1 - rank, errors.LOST_PEER, seen + seconds)]
    verdict = exit_status.judge([0, 1], exit_status.read_rank_exit_statuses(broken.run_dir), deaths)
    assert verdict.code == errors.LOST_PEER
    assert verdict.reason.startswith(f"rank {rank} was killed by SIGKILL")
    broken.require_next_start(uninterrupted)


@pytest.mark.parametrize(("name", "rank"), SLOW_TABLE)
@pytest.mark.parametrize("timeout", [STOPPED_TIMEOUT])
def test_a_stopped_rank_is_waited_for_no_longer_than_agreed(
    broken: Broken, uninterrupted: Whole, name: str, rank: int, timeout: float
) -> None:
    since = time.time()
    with broken.start(signal.SIGSTOP) as ranks:
        toy.wait_until_stopped(ranks[rank])
        seconds = wait_for_other(ranks, rank)
    # torch tries twice to reach a rank 0 that has not come.
    assert seconds < (2 if name == "joining" else 1) * (timeout + heartbeat.WAITING_SECONDS) + 10
    verdict = judge_stopped(broken.run_dir, rank, since)
    assert verdict.code == errors.LOST_PEER
    assert verdict.reason.startswith(
        f"rank {rank} was killed when its process had stood still for "
    )
    assert f", last seen in {broken.phase.noted}" in verdict.reason
    broken.require_next_start(uninterrupted)


def judge_stopped(run_dir: Path, rank: int, since: float) -> ExitStatus:
    """Return the verdict when torchrun has killed the stopped rank, half a minute after the other one gave up."""
    now = time.time()
    deaths = [
        Death(1 - rank, errors.LOST_PEER, now),
        Death(rank, -signal.SIGKILL, now + TORCHRUN_SECONDS),
    ]
    frozen = heartbeat.find_frozen(run_dir, deaths, since)
    return exit_status.judge(
        [0, 1], exit_status.read_rank_exit_statuses(run_dir), deaths, frozen=frozen
    )


def wait_for_all(run_dir: str) -> None:
    """Be one rank of two that do nothing but meet, with little patience."""
    with (
        process_group.join(timeout_seconds=PATIENCE) as world,
        heartbeat.watch(Path(run_dir), world.rank, 0.2),
    ):
        heartbeat.beat("evaluation", 3)
        process_group.barrier(world)


def test_a_stopped_rank_is_named_with_its_phase(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    since = time.time()
    with started(
        wait_for_all, 2, str(tmp_path), environ={"KUBETUNE_FAULT": "signal 19:evaluation:1:1"}
    ) as ranks:
        assert wait_all(ranks[:1]) == [errors.LOST_PEER]
    verdict = judge_stopped(tmp_path, 1, since)
    assert verdict.code == errors.LOST_PEER
    assert "rank 1 was killed when its process had stood still for " in verdict.reason
    assert ", last seen in evaluation after step 3" in verdict.reason


@pytest.mark.slow
@every_phase
def test_a_late_rank_is_waited_for(
    broken: Broken, uninterrupted: Whole, name: str, rank: int
) -> None:
    with broken.start(signal.SIGSTOP) as ranks:
        toy.wait_until_stopped(ranks[rank])
        until = time.monotonic() + IMPATIENCE / 5
        wait_until(lambda: time.monotonic() > until)
        toy.go_on(ranks[rank])
        assert wait_all(ranks) == [0, 0]
    assert toy.digests(broken.run_dir) == uninterrupted(broken.config, 2)
