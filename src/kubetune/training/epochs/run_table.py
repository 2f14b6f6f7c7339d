"""The table that a person watches on a terminal: a row before training, and one for each epoch and evaluation.

    epoch   step    loss   eval_loss   eval_exact_match
        0      0              6.269                  0
        1     75  0.8819      0.134               0.73   best so far

Rows are printed as they come, above the progress bar. The log file has a line for each of them, and much more.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from kubetune.base.humanize import number, visible
from kubetune.base.terminal import BOLD, DIM, GREEN, coloured
from kubetune.config.metric_names import TELLING, main_metric
from kubetune.plan.plan import Plan
from kubetune.rundir import metrics, shapes
from kubetune.rundir.checkpoints import State
from kubetune.training.epochs.step_means import StepMeans

# Rows of a run of many epochs or evaluations, about: one for each so large a share of its steps.
_MOST_ROWS: Final = 20
_GAP: Final = "  "
_BEST: Final = "best so far"


class RunTable:
    """The rows of one start of a run, with those of earlier starts."""

    def __init__(self, plan: Plan, best_by: str, columns: int | None = None) -> None:
        """`best_by`: the metric that chooses the best checkpoint. `columns`: of the terminal, None to ask it."""
        self._plan = plan
        self._best_by = best_by
        self._columns = columns or shutil.get_terminal_size().columns
        self._means = StepMeans()
        # Names and widths of the columns of the head that was printed last.
        self._head: dict[str, int] = {}
        # The share of the run at which the last row was printed.
        self._shown_at = -1
        # A row that was left out: if the run ends after it, it is the last one.
        self._left_out: tuple[dict[str, str], bool] | None = None

    def step(self, step: int, values: Mapping[str, Any], *, is_evaluated: bool) -> None:
        """Note a step. At the end of an epoch print its row, unless the step `is_evaluated`, which has one itself."""
        self._means.add(values)
        if step % self._plan.steps_per_epoch == 0 and not is_evaluated:
            self._add(step, {}, is_best=False)

    def evaluation(self, step: int, values: Mapping[str, Any], *, is_best: bool) -> None:
        """Print the row of an evaluation, at step 0 that of the model before training."""
        self._add(step, values, is_best=is_best)

    def remember(self, run_dir: Path, state: State) -> None:
        """Print the rows of earlier starts, and of the model before training."""
        # Not every run is measured before its first step.
        if (run_dir / metrics.BASE).is_file():
            base = shapes.read(run_dir / metrics.BASE)["metrics"]
            self.evaluation(0, base, is_best=False)
        for line in metrics.stream_lines(run_dir / metrics.METRICS):
            step = line["step"]
            if step > state.step:
                continue
            if metrics.is_evaluation(line):
                self.evaluation(step, line, is_best=step == state.best_step)
            elif "loss" in line:
                is_evaluated = bool(self._plan.eval_rows) and self._plan.is_eval_step(step)
                self.step(step, line, is_evaluated=is_evaluated)

    def end(self) -> None:
        """Print the last row of a run that ends early, if it was left out."""
        if self._left_out is not None:
            self._print(*self._left_out)
            self._left_out = None

    def _add(self, step: int, evaluation: Mapping[str, Any], *, is_best: bool) -> None:
        """Print a row, unless one of about the same share of the run is there."""
        row = self._row(step, evaluation)
        share = step * _MOST_ROWS // max(self._plan.num_steps, 1)
        is_last = step == self._plan.num_steps
        if share == self._shown_at and not is_last:
            self._left_out = (row, is_best)
            return
        self._shown_at = share
        self._left_out = None
        self._means.clear()
        self._print(row, is_best)

    def _row(self, step: int, evaluation: Mapping[str, Any]) -> dict[str, str]:
        """Return the cells of a row by the names of their columns."""
        row = {
            # At most two decimals, as the column is five wide.
            "epoch": f"{round(step / self._plan.steps_per_epoch, 2):g}",
            "step": f"{step:,}",
        }

        measures = self._means.measures()
        loss = self._means.loss()
        # The loss of a run by rewards says nothing of how it goes.
        by_reward = "reward" in measures or "eval_reward" in evaluation
        if by_reward:
            row["reward"] = ""
        else:
            row["loss"] = ""

        if by_reward and "reward" in measures:
            row["reward"] = f"{measures['reward']:.3g}"
        if not by_reward and loss is not None:
            row["loss"] = f"{loss:.4f}"

        names = [main_metric(evaluation, self._best_by) or "", "eval_accuracy", "eval_margin"]
        names.insert(0, "eval_reward" if by_reward else "eval_loss")
        for name in dict.fromkeys(names):
            if metrics.is_number(evaluation.get(name)):
                row[name] = number(evaluation[name])
        # Without evaluations, measures of the steps tell how it goes.
        if not evaluation and not self._plan.eval_rows:
            for name in TELLING:
                if name in measures and not name.endswith("_std"):
                    row[name] = f"{measures[name]:.3g}"
        return row

    def _print(self, row: Mapping[str, str], is_best: bool) -> None:
        if not row.keys() <= self._head.keys():
            self._print_head(row)

        cells = []
        for name, width in self._head.items():
            cells.append(f"{visible(row.get(name, '')):>{width}}")

        line = _GAP.join(cells)
        if row["step"] == "0":
            line = coloured(f"{line}{_GAP}before training", DIM)
        elif is_best:
            line += _GAP + coloured(_BEST, GREEN)
        _show(line.rstrip())

    def _print_head(self, row: Mapping[str, str]) -> None:
        """Print the head anew, with the columns of a row that it lacks and for which there is room."""
        widths = {"epoch": 5, "step": max(len(f"{self._plan.num_steps:,}"), 4)}
        total = sum(widths.values()) + 2 * len(_GAP) + len(_BEST)
        for name in (*self._head, *row):
            width = max(len(visible(name)), 8)
            if name not in widths and total + len(_GAP) + width <= self._columns:
                widths[name] = width
                total += len(_GAP) + width

        if widths != self._head:
            self._head = widths
            names = [f"{visible(name):>{width}}" for name, width in widths.items()]
            _show(coloured(_GAP.join(names), BOLD))


def _show(line: str) -> None:
    # A terminal that is gone ends no run.
    with suppress(OSError):
        print(line, flush=True)
