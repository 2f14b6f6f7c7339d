"""Two runs on the same questions, or a run and its base model, by the answers that their evaluations left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kubetune.rundir import checkpoints
from kubetune.scoring.comparison import Answered, Measured, compare_answers, read_answers

# In the place of another run: this one's model before training.
BASE = "base"


def compare_runs(
    run_dir: Path,
    other: str,
    which: str = "best",
) -> list[Measured]:
    """Return every measure that the answers of both have, tested in pairs.

    One is a run's checkpoint, `other` a run directory or `base`. Raise ConfigError for a folder that is not a
    run, a run that kept no answers, or two that were not asked the same.
    """
    after = _answers(run_dir, which)
    # Answers of step 0 are those of the model before training.
    if other == BASE:
        before = read_answers(run_dir, 0)
    else:
        before = _answers(Path(other), "best")

    return compare_answers(before, after)


def _answers(run_dir: Path, which: str) -> list[Answered]:
    """Return what a checkpoint answered when it was evaluated."""
    step = checkpoints.load_state(checkpoints.choose(run_dir, which)).step
    return read_answers(run_dir, step)


def table(measures: Sequence[Measured], names: tuple[str, str]) -> list[str]:
    """Return lines for a terminal: each measure of both, its 95 % interval, rows gained and lost, and p."""
    rows = [("metric", *names, "95 %", "gained", "lost", "p")]
    tests: list[str] = []
    for measured in measures:
        low, high = measured.after_interval
        paired = measured.paired
        rows.append(
            (
                measured.metric,
                f"{measured.before:.4g}",
                f"{measured.after:.4g}",
                f"{low:.3g}–{high:.3g}",
                str(paired.gained),
                str(paired.lost),
                f"{paired.p_value:.2g}",
            )
        )
        if paired.test not in tests:
            tests.append(paired.test)

    # Each column is as wide as its widest cell.
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    rows_asked = f"{measures[0].rows} rows that both were asked"
    return [*lines, "", f"{rows_asked}; p: {', '.join(tests)}, two-sided"]
