"""Two runs on the same questions, or a run and its base model, by the answers that their evaluations left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kubetune.rundir import checkpoints
from kubetune.scoring.comparison import Answered, Measured, compare_answers, read_answers

BASE = "base"
"""In the place of another run: this one's model before training."""


def compare_runs(run_dir: Path, other: str, which: str = "best") -> list[Measured]:
    """Every measure of answers that `other`, a run directory or `base`, and a run's checkpoint have, tested in pairs.

    Raises ConfigError where a run is none, or kept no answers, or the two were not asked the same.
    """
    after = _answers(run_dir, which)
    before = read_answers(run_dir, 0) if other == BASE else _answers(Path(other), "best")
    return compare_answers(before, after)


def _answers(run_dir: Path, which: str) -> list[Answered]:
    return read_answers(run_dir, checkpoints.load_state(checkpoints.choose(run_dir, which)).step)


def table(found: Sequence[Measured], names: tuple[str, str]) -> list[str]:
    """Lines for a terminal: each measure of both, its 95 % interval, rows gained and lost, and p."""
    heads = ("metric", *names, "95 %", "gained", "lost", "p")
    rows = [
        (
            measured.metric,
            f"{measured.before:.4g}",
            f"{measured.after:.4g}",
            "{:.3g}–{:.3g}".format(*measured.after_interval),
            str(measured.paired.gained),
            str(measured.paired.lost),
            f"{measured.paired.p_value:.2g}",
        )
        for measured in found
    ]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        for row in (heads, *rows)
    ]
    tests = ", ".join(dict.fromkeys(measured.paired.test for measured in found))
    return [
        *(line.rstrip() for line in lines),
        "",
        f"{found[0].rows} rows that both were asked; p: {tests}, two-sided",
    ]
