"""The small curve of a run in the list: all of its evaluations, each at its step, however often the run logs."""

from __future__ import annotations

import json
from pathlib import Path

from kubetune.rundir import metrics
from kubetune.ui.run_index import _measured, by_step, spark


def write_numbers(run_dir: Path, steps: int, measured_at: list[int]) -> None:
    lines = []
    for step in range(1, steps + 1):
        lines.append({"step": step, "loss": 1.0, "tokens_per_second": 1234.5, "grad_norm": 0.25})
        if step in measured_at:
            lines.append({"step": step, "eval_loss": 2.0, "eval_exact_match": step / steps})
    run_dir.mkdir()
    (run_dir / metrics.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_evaluations_are_those_of_the_whole_file(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    write_numbers(run_dir, 3000, [100, 2000, 3000])
    # More than what is read of its end at once.
    assert (run_dir / metrics.METRICS).stat().st_size > 200_000
    assert [line["step"] for line in metrics.evaluations(run_dir)] == [3000, 2000, 100]


def test_values_stand_at_their_steps(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    write_numbers(run_dir, 400, [100, 400])
    points = by_step(_measured(run_dir, {"eval_exact_match": 0.0}), "eval_exact_match")
    assert points == [(0, 0.0), (100, 0.25), (400, 1.0)]
    assert spark(points) == "0.0,26.0 30.0,20.0 120.0,2.0"


def test_of_many_evaluations_some_are_drawn_and_the_last_is(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    write_numbers(run_dir, 300, list(range(3, 301, 3)))
    points = by_step(_measured(run_dir, {}), "eval_exact_match")
    assert len(points) <= 40
    assert points[-1] == (300, 1.0)
