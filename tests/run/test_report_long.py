"""The page of a run of very many steps: soon there, in little memory, and still showing what was rare."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kubetune.reporting.numbers import read_numbers
from kubetune.reporting.series import Thinner, shorten

MEASURED = r"""
import re, sys
from pathlib import Path
opened = []
sys.addaudithook(lambda event, args: opened.append(Path(str(args[0])).name) if event == "open" else None)
from kubetune.cli import main
code = main(["report", sys.argv[1], "-o", sys.argv[2]])
highest = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())  # of getrusage a part is the parent's
print(opened.count("metrics.jsonl"), opened.count("timings.jsonl"), highest[1])
sys.exit(code)
"""


def write_run(run_dir: Path, steps: int, ranks: int = 2) -> Path:
    """Return a run directory with the numbers of so many steps, and one spike of the loss."""
    run_dir.mkdir()
    config = {
        "name": "long",
        "model": {"path": "org/model"},
        "data": {"train": [{"path": "train.jsonl"}]},
    }
    (run_dir / "resolved.json").write_text(json.dumps(config))
    draw = random.Random(0)
    spike = steps * 2 // 3
    with (
        (run_dir / "metrics.jsonl").open("w") as lines,
        (run_dir / "timings.jsonl").open("w") as timings,
    ):
        for step in range(1, steps + 1):
            loss = 99.0 if step == spike else 2.0 + draw.random()
            lines.write(
                f'{{"step": {step}, "epoch": {step / 1000}, "loss": {loss}, "learning_rate": {1e-4 * draw.random()}, '
                f'"grad_norm": {draw.random()}, "samples": 32, "tokens": 6000, "trained_tokens": 2000}}\n'
            )
            if step % (steps // 50) == 0:
                lines.write(
                    f'{{"step": {step}, "epoch": {step / 1000}, "eval_loss": {draw.random()}}}\n'
                )
            seconds = ", ".join(str(draw.random()) for _ in range(ranks))
            timings.write(
                f'{{"step": {step}, "seconds": 0.5, "tokens_per_second": {draw.random() * 1e4}, '
                f'"trained_tokens_per_second": {draw.random() * 1e3}, "peak_memory_bytes": {10**10 + step}, '
                f'"rank_seconds": [{seconds}]}}\n'
            )
    return run_dir


@pytest.mark.parametrize(
    "steps", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)], ids=["20,000", "1,000,000"]
)
def test_a_long_run_is_read_in_one_go_and_in_little_memory(tmp_path: Path, steps: int) -> None:
    run_dir = write_run(tmp_path / "run", steps)
    page = tmp_path / "page.html"
    done = subprocess.run(
        [sys.executable, "-P", "-c", MEASURED, str(run_dir), str(page)],
        capture_output=True,
        text=True,
        check=True,
    )
    *opened, kilobytes = map(int, done.stdout.split()[-3:])
    assert opened == [1, 1]
    assert kilobytes / 1024 < 200
    text = page.read_text()
    data = json.loads(
        re.search(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.S)[1]
    )  # type: ignore[index]
    (loss,) = (chart for chart in data["charts"] if chart["name"] == "loss")
    assert (
        max(value for column in loss["data"][1:] for value in column if value is not None) == 99.0
    )
    assert len(loss["data"][0]) <= 600 + 50


@pytest.mark.parametrize("count", [1, 5, 599, 600, 601, 1200, 1201, 9999])
def test_a_column_is_thinned_while_it_is_read(count: int) -> None:
    draw = random.Random(count)
    values = [None if draw.random() < 0.1 else draw.uniform(-5, 5) for _ in range(count)]
    steps = list(range(1, count + 1))
    thinner = Thinner(600)
    for begin in range(0, count, 97):
        thinner.extend(steps[begin : begin + 97], values[begin : begin + 97])
    series = thinner.series()
    size = next(2**power for power in range(20) if count // 2**power <= 600)
    if values == [None]:
        assert series is None
        return
    assert series is not None
    assert series == shorten(steps, values, 600)
    assert count <= 600 or 300 <= len(series.steps) <= 601
    buckets = [values[begin : begin + size] for begin in range(0, count, size)]
    assert series.steps == [min(begin + size, count) for begin in range(0, count, size)]
    for bucket, value in zip(buckets, series.values, strict=True):
        finite = [number for number in bucket if number is not None]
        if finite:
            assert value == pytest.approx(sum(finite) / len(finite), rel=1e-4)
        else:
            assert value is None


def test_sums_over_ranks_are_of_the_number_that_the_run_had_last(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 1.0, "tokens": 3}\n{"step": 2, "eval_loss": 0.5}\n'
    )
    seconds = [[9.0, 1.0, 1.0], [1.0, 2.0], [3.0, 2.0], [1.0, 4.0]]
    lines = [
        {"step": step, "seconds": 1.0, "rank_seconds": row} for step, row in enumerate(seconds, 1)
    ]
    (tmp_path / "timings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = read_numbers(tmp_path, 600, {"metrics.jsonl": [], "timings.jsonl": []})
    assert (result.totals.steps, result.totals.tokens, result.totals.seconds) == (1, 3, 4.0)
    assert result.evaluations == [{"step": 2, "eval_loss": 0.5}]
    assert result.ranks is not None
    assert result.ranks.means == pytest.approx([5 / 3, 8 / 3])
    assert result.ranks.slowest == pytest.approx([1 / 3, 2 / 3])
    assert result.ranks.lost == pytest.approx((9 - 13 / 2) / 9)
    assert result.curves["skew"].values == pytest.approx([1 - 1 / 9, 0.5, 1 / 3, 0.75], rel=1e-4)
