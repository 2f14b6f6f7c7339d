"""A rank that hangs or vanishes ends the run soon, non-zero, and it is said which one and where."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from kubetune import endings, errors
from kubetune.watchdog import HANG
from tests import toy
from tests.ranks import run_ranks

TIMEOUT = 2.0


@pytest.fixture
def run_dir(toy_inputs: Path, tmp_path: Path) -> Path:
    run_ranks(str, 1)  # so that starting the server of ranks is not counted
    return toy.make_run(tmp_path / "run", toy.make_config(toy_inputs, {"timeout_seconds": TIMEOUT}), 2)


def seconds_and_codes(run_dir: Path, world_size: int, fault: str) -> tuple[float, list[int]]:
    began = time.monotonic()
    codes = toy.train(run_dir, world_size, {"KUBETUNE_FAULT": fault})
    return time.monotonic() - began, codes


@pytest.mark.parametrize(
    ("world_size", "point", "rank", "step"),
    [
        (1, "micro-batch:8", 0, 4),
        (2, "step:4", 1, 3),
        pytest.param(2, "evaluation", 1, 3, marks=pytest.mark.slow),
        (2, "save", 0, 3),
    ],
)
def test_a_hung_rank_ends_the_run_and_is_named(
    run_dir: Path, world_size: int, point: str, rank: int, step: int
) -> None:
    where = point if ":" in point else f"{point}:1"
    seconds, codes = seconds_and_codes(run_dir, world_size, f"hang:{where}:{rank}")
    assert codes == [errors.LOST_PEER] * world_size
    assert seconds < TIMEOUT + 5 + 5  # the last five: importing and the steps before
    hang = json.loads((run_dir / HANG).read_text())
    assert (hang["rank"], hang["phase"], hang["waiting"]) == (rank, where.split(":")[0], False)
    assert hang["step"] == step
    assert "faults.reach(phase)" in hang["stack"]
    verdict = endings.judge(range(world_size), endings.read_rank_endings(run_dir), [])
    assert verdict.code == errors.LOST_PEER
    assert verdict.reason.startswith(f"rank {rank} hung in {hang['phase']} for 2 s after step {step}")


def test_a_rank_that_holds_the_interpreter_is_ended_with_its_stack(run_dir: Path) -> None:
    seconds, codes = seconds_and_codes(run_dir, 2, "freeze:step:3:1")
    assert codes == [errors.LOST_PEER, errors.BUG]
    assert seconds < TIMEOUT + 5 + 5
    assert "in loop" in (run_dir / "logs" / "rank-1.frozen.txt").read_text()


@pytest.mark.parametrize("code", [0, 7])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_leaves_early_is_no_success(run_dir: Path, rank: int, code: int) -> None:
    """Even with exit code 0: the others do not wait for ever, and do not end well."""
    _, codes = seconds_and_codes(run_dir, 2, f"exit {code}:micro-batch:9:{rank}")
    assert codes[rank] == code
    assert codes[1 - rank] == errors.LOST_PEER
    assert endings.judge([0, 1], endings.read_rank_endings(run_dir), []).code == errors.LOST_PEER


def test_a_run_that_goes_well_leaves_no_trace_of_its_watchdog(run_dir: Path) -> None:
    (run_dir / HANG).touch()
    assert toy.train(run_dir, 2) == [0, 0]
    assert not (run_dir / HANG).exists()
    assert not list(run_dir.rglob("*.frozen.txt"))
