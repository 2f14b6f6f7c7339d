"""The pod of a node is replaced at each moment of a start and of an end: the others notice, and the run ends the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest

from kubetune import errors
from kubetune.config.schema import Config
from kubetune.rundir import checkpoints, exit_status
from kubetune.rundir.checkpoints import State
from kubetune.rundir.report import read_report
from tests import toy
from tests.gang import SECONDS, Gang, Restarts
from tests.ranks import wait_until

# Nobody may wait for it: tests wait far less.
TIMEOUT = 900.0
STEPS = 4

Whole = Callable[[Config, int], dict[str, str]]


@dataclass(frozen=True)
class Moment:
    """A point that a node reaches: its agent, or its rank."""

    point: str
    nth: int = 1
    nodes: tuple[int, ...] = (0, 1)
    of_agent: bool = False


# The run has 4 steps and saves the second and the last, which it evaluates.
MOMENTS = {
    "agent waits": Moment("node.waits", of_agent=True),
    "agents have met": Moment("node.met", of_agent=True),
    "joining": Moment("joining"),
    "rendezvous": Moment("rendezvous"),
    "starting": Moment("starting"),
    "loading": Moment("loading"),
    "first step": Moment("step"),
    "all-reduce": Moment("all-reduce", 3),
    "evaluation": Moment("evaluation"),
    "first save": Moment("save", nodes=(0,)),
    "last save": Moment("save", 2),
    "last save written": Moment("commit.written", 2, nodes=(0,)),
    "last save sealed": Moment("commit.sealed", 2, nodes=(0,)),
    "last save named": Moment("commit.renamed", 2, nodes=(0,)),
    "last save linked": Moment("link", 2, nodes=(0,)),
    "report": Moment("report"),
    "report written": Moment("write report.json", nodes=(0,)),
    "ranks have ended": Moment("node.ended", of_agent=True),
    "end is noted": Moment("node.noted", of_agent=True),
}


@pytest.fixture
def config(toy_inputs: Path) -> Config:
    training = {
        "num_train_epochs": STEPS / toy.STEPS_PER_EPOCH,
        "eval_steps": STEPS,
        "save_steps": 2,
        "preflight": False,
        "timeout_seconds": TIMEOUT,
    }
    return toy.make_config(toy_inputs, training, compute={"nodes": 2, "processes": 1})


@pytest.fixture
def run_dir(config: Config, tmp_path: Path) -> Path:
    return toy.make_run(tmp_path / "run", config, 2)


def replace_at(gang: Gang, name: str, node: int) -> None:
    """Start all nodes, and replace the pod of one of them at a moment."""
    moment = MOMENTS[name]
    rank = 0 if moment.of_agent else node
    fault = f"signal 19:{moment.point}:{moment.nth}:{rank}"
    gang.start_all({node: {"KUBETUNE_FAULT": fault}})
    gang.wait_until_stopped(node)
    gang.replace(node)


def rows() -> Iterator[object]:
    """Yield each moment, node and kind of restart."""
    for name, moment in MOMENTS.items():
        for node, restarts in product(moment.nodes, ("one by one", "together")):
            yield name, node, restarts


@pytest.mark.slow
@pytest.mark.parametrize(("name", "node", "restarts"), [*rows()])
def test_a_pod_that_is_replaced_costs_one_start(
    run_dir: Path, config: Config, uninterrupted: Whole, name: str, node: int, restarts: Restarts
) -> None:
    with Gang(run_dir, 2, restarts) as gang:
        replace_at(gang, name, node)
        gang.run_to_end()
    # What was replaced itself, and once all others.
    assert all(starts <= 3 for starts in gang.starts), gang.all_printed()
    assert toy.digests(run_dir) == uninterrupted(config, 2)
    assert_done(run_dir)


@pytest.mark.slow
def test_a_node_that_is_slow_to_end_loses_no_end_to_the_next_start(
    run_dir: Path, config: Config, uninterrupted: Whole
) -> None:
    """Node 0 comes back, and clears the ends of all ranks, before the agent of node 1 has read that of its own."""
    told = run_dir / "logs" / "rank-1.exit.json"
    with Gang(run_dir, 2) as gang:
        gang.start_all({0: {"KUBETUNE_FAULT": "signal 19:write report.json:1:0"}})
        gang.wait_until_stopped(0)
        wait_until(told.exists, SECONDS)
        os.kill(gang.pid(1), signal.SIGSTOP)
        gang.replace(0)
        wait_until(lambda: not told.exists(), SECONDS)
        os.kill(gang.pid(1), signal.SIGCONT)
        gang.run_to_end()
    assert gang.codes[1] == [errors.OK]
    assert toy.digests(run_dir) == uninterrupted(config, 2)
    assert_done(run_dir)


@pytest.fixture
def finished(run_dir: Path, config: Config) -> Path:
    """Return a run of two nodes that has ended, but whose node 0 died before it could say so."""
    toy.finished(run_dir, config, 2)
    return run_dir


def test_a_node_that_comes_back_to_a_run_that_is_over_meets_nobody(
    finished: Path, config: Config, uninterrupted: Whole
) -> None:
    """Node 1 ends at once, and node 0 writes what is missing, though no other node comes again."""
    (finished / "report.json").unlink()
    (finished / "checkpoints" / "last").unlink()
    with Gang(finished, 2) as gang:
        gang.start(1)
        assert gang.wait_for_ends([1], SECONDS) == [errors.OK]
        assert f"step {STEPS} is saved. Node 1 has nothing to do" in gang.printed(1)
        assert not (finished / "exit.json").exists()

        gang.start(0)
        assert gang.wait_for_ends([0], SECONDS) == [errors.OK]
        assert "meets the others" not in gang.printed(0)
    assert toy.digests(finished) == uninterrupted(config, 2)
    assert read_report(finished)["world_size"] == 2
    assert_done(finished)


@pytest.mark.slow
def test_a_last_checkpoint_with_a_wrong_byte_is_trained_again(
    finished: Path, config: Config, uninterrupted: Whole
) -> None:
    """Sizes alone say that the run is over, so node 0 finds the damage when it is alone, and says what to do."""
    adapter = checkpoints.folder_of(finished, STEPS) / "adapter_model.safetensors"
    damaged = bytearray(adapter.read_bytes())
    damaged[-1] ^= 1
    adapter.write_bytes(damaged)
    with Gang(finished, 2) as gang:
        gang.start(0)
        assert gang.wait_for_ends([0], SECONDS) == [errors.LOST_PEER]
        assert "all nodes have to train again after step 2." in gang.printed(0)
        assert "run `kubetune delete` and `kubetune submit`" in gang.printed(0)
        gang.start_all()
        gang.run_to_end()
    assert toy.digests(finished) == uninterrupted(config, 2)
    assert_done(finished)


@pytest.mark.parametrize(
    "training",
    [
        pytest.param({"evaluated_step": 2}, id="the last step is not evaluated"),
        pytest.param({"step": 2, "saved_step": 2}, id="steps are left"),
    ],
)
def test_a_run_with_something_left_is_not_over(training: dict[str, int]) -> None:
    state = State(step=STEPS, saved_step=STEPS, evaluated_step=STEPS)
    assert state.is_last(STEPS, evaluates=True, patience=None)
    assert not replace(state, **training).is_last(STEPS, evaluates=True, patience=None)
    spent = replace(state, step=2, evaluated_step=2, evaluations_without_improvement=3)
    assert spent.is_last(STEPS, evaluates=True, patience=3)
    assert not spent.is_last(STEPS, evaluates=True, patience=4)


def assert_done(run_dir: Path) -> None:
    status = exit_status.read_exit_status(run_dir)
    assert status is not None
    assert (status.code, status.step) == (errors.OK, STEPS)
    assert read_report(run_dir)["steps"] == STEPS
