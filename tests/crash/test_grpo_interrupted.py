"""kill -9 and SIGTERM at random moments of learning by reward: the same end, and after SIGTERM nothing is drawn twice.

Each way of drawing is interrupted at visits of points in the code (drawing, rewarding, updating, loading adapters,
saving) and at random times. What a run that goes on has at its end is compared bit by bit with a run that nobody
disturbed: weights, optimizer, losses, and every line of the files of answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from kubetune import errors
from kubetune.config.schema import Config
from kubetune.rundir import metrics
from kubetune.scoring.rewards.pool import RewardPool
from kubetune.scoring.rewards.request import Judgement, Request
from kubetune.training import worker
from kubetune.training.rollouts import rollout_records
from tests import toy
from tests.ranks import started, wait_all, wait_until
from tests.run.test_grpo import config_of
from tests.vllm_server import running

KILLED = -signal.SIGKILL

SAVING = ("save", "commit.weights", "commit.sealed", "commit.renamed", "link")
OWN = ("evaluation", "generation", "reward", "step", "micro-batch", *SAVING)
SERVED = (
    "evaluation",
    "generation",
    "reward",
    "micro-batch",
    "sync",
    "adapter.sealed",
    "commit.sealed",
)


@dataclass(frozen=True)
class Way:
    """A way to draw answers, and how often runs of it are interrupted."""

    points: tuple[str, ...]
    kills: int
    stops: int
    settings: dict[str, Any]
    world_size: int = 1
    is_served: bool = False


WAYS = {
    "own": Way(OWN, 16, 8, {}),
    "two ranks, windows": Way(
        OWN, 12, 6, {"num_iterations": 2, "steps_per_generation": 2, "beta": 0.05}, world_size=2
    ),
    "servers": Way(SERVED, 10, 2, {}, is_served=True),
    "servers that lag, windows": Way(
        SERVED, 12, 4, {"servers": {"lag": 1}, "steps_per_generation": 2}, is_served=True
    ),
}


def rank_that_notes(run_dir: str, calls: str) -> int:
    """Be a rank that writes into a file which groups of answers it has judged: step and prompt, a line for each."""
    judge = RewardPool.judge

    def noting(pool: RewardPool, request: Request) -> list[Judgement]:
        # To a held-out prompt there is one answer, and an evaluation that is cut short is done anew.
        if len(request.texts) > 1:
            with open(calls, "a") as file:
                file.write(json.dumps([request.step, request.prompt]) + "\n")
        return judge(pool, request)

    RewardPool.judge = noting
    return worker.main([run_dir])


class Runs:
    """Runs of one way, beside one that nobody disturbed."""

    def __init__(self, folder: Path, way: Way, config: Config, calls: Path) -> None:
        self.way = way
        self.calls = calls
        self._folder = folder
        self._config = config
        self._number = 0
        # How often a run comes by each point at least, as far as is known.
        self._visits = dict.fromkeys(way.points, 60)
        run_dir = self.made()
        with self.started(run_dir) as ranks:
            wait_until(lambda: has_loaded(run_dir))
            began = time.monotonic()
            codes = wait_all(ranks)
        assert codes == [0] * way.world_size, toy.log_of(run_dir)
        self.seconds = time.monotonic() - began
        self.end = end_of(run_dir)

    def made(self) -> Path:
        """Return another run directory, and forget what rewards were asked."""
        self._number += 1
        self.calls.unlink(missing_ok=True)
        return toy.make_run(self._folder / f"run-{self._number}", self._config, self.way.world_size)

    def started(
        self, run_dir: Path, environ: dict[str, str] | None = None
    ) -> contextlib.AbstractContextManager[list[ForkServerProcess]]:
        """Start the ranks of a run."""
        places = (str(run_dir), str(self.calls))
        return started(rank_that_notes, self.way.world_size, *places, environ=environ)

    def trained(self, run_dir: Path, environ: dict[str, str] | None = None) -> list[int]:
        """Let a run go on to its end; return the exit codes of its ranks."""
        with self.started(run_dir, environ) as ranks:
            return wait_all(ranks)

    def interrupted(self, draw: random.Random, number: signal.Signals) -> tuple[Path, str]:
        """Return a run that a signal ended at a random moment, and the moment in words."""
        while True:
            run_dir = self.made()
            if draw.random() < 0.25:
                seconds = draw.uniform(0.0, self.seconds)
                moment = f"{seconds:.2f} s after the model was loaded"
                codes = self._interrupt_after(run_dir, draw, seconds, number)
            else:
                point = draw.choice(self.way.points)
                nth = draw.randint(1, self._visits[point])
                rank = draw.randrange(self.way.world_size)
                moment = f"at visit {nth} of {point} by rank {rank}"
                environ = {"KUBETUNE_FAULT": f"signal {number.value}:{point}:{nth}:{rank}"}
                codes = self.trained(run_dir, environ)
                if codes == [0] * self.way.world_size:
                    # It came by less often than that.
                    self._visits[point] = max(1, nth - 1)
            if codes == [0] * self.way.world_size:
                assert end_of(run_dir) == self.end, moment
                continue
            # A rank may be through when the other one is killed.
            expected = {KILLED, errors.LOST_PEER, 0}
            if number == signal.SIGTERM:
                expected = {errors.PREEMPTED, 0}
            assert set(codes) <= expected, (moment, codes, toy.log_of(run_dir))
            return run_dir, moment

    def _interrupt_after(
        self, run_dir: Path, draw: random.Random, seconds: float, number: signal.Signals
    ) -> list[int]:
        with self.started(run_dir) as ranks:
            ends = [rank.sentinel for rank in ranks]
            wait_until(lambda: has_loaded(run_dir) or wait(ends, 0))
            if not wait(ends, seconds):
                rank = draw.choice(ranks)
                assert rank.pid is not None
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, number)
            return wait_all(ranks)


def has_loaded(run_dir: Path) -> bool:
    """True if a run has its model, and draws from here on."""
    return any(event["event"] == "start" for event in metrics.read_events(run_dir))


def end_of(run_dir: Path) -> dict[str, Any]:
    """Return all that a repeat of a run must reproduce bit for bit, the lines of its answers by step and prompt."""
    answers: dict[str, Any] = {}
    for step in rollout_records.steps_of(run_dir):
        for text in rollout_records.file_of(run_dir, step).read_text().splitlines():
            # A kill may leave half a line, which readers step over.
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                place = f"step {step} prompt {line['slot']}"
                assert place not in answers, f"{place} has two lines"
                answers[place] = text
    held_out = {}
    for path in (run_dir / metrics.ANSWERS).glob("step-*.jsonl"):
        held_out[f"evaluation {path.name}"] = path.read_text()
    assert "evaluation step-000000.jsonl" in held_out
    return {**toy.digests(run_dir), **held_out, **answers}


@pytest.fixture(scope="module", params=WAYS)
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runs]:
    """Yield the runs of each way."""
    way = WAYS[request.param]
    folder = tmp_path_factory.mktemp("interrupted")
    inputs = toy.make_inputs(folder / "inputs")
    with contextlib.ExitStack() as stack:
        settings = dict(way.settings)
        if way.is_served:
            servers = stack.enter_context(running(inputs / "model", folder / "servers", 2))
            urls = [server.url for server in servers]
            settings["servers"] = {
                "urls": urls, "timeout_seconds": 60, **settings.get("servers", {}),
            }  # fmt: skip
        config = config_of(inputs, **settings)
        yield Runs(folder, way, config, folder / "calls.jsonl")


@pytest.mark.slow
def test_a_kill_at_a_random_moment_changes_nothing(runs: Runs) -> None:
    draw = random.Random(11)
    for _ in range(runs.way.kills):
        run_dir, moment = runs.interrupted(draw, signal.SIGKILL)
        codes = runs.trained(run_dir)
        assert codes == [0] * runs.way.world_size, (moment, toy.log_of(run_dir))
        assert end_of(run_dir) == runs.end, moment
        print("killed", moment)


@pytest.mark.slow
def test_a_stop_at_a_random_moment_draws_nothing_twice_and_loses_nothing(runs: Runs) -> None:
    draw = random.Random(12)
    for _ in range(runs.way.stops):
        run_dir, moment = runs.interrupted(draw, signal.SIGTERM)
        before = answers_of(run_dir)
        codes = runs.trained(run_dir)
        assert codes == [0] * runs.way.world_size, (moment, toy.log_of(run_dir))
        assert end_of(run_dir) == runs.end, moment
        # What was drawn before the stop still stands there, and no group was judged again.
        assert before.items() <= end_of(run_dir).items(), moment
        judged = Counter(runs.calls.read_text().splitlines())
        assert set(judged.values()) == {1}, (moment, judged.most_common(3))
        assert len(judged) == len(answers_of(run_dir)), moment
        print("stopped", moment)


def answers_of(run_dir: Path) -> dict[str, str]:
    """Return the lines of the answers alone."""
    return {place: line for place, line in end_of(run_dir).items() if place.startswith("step ")}
