"""What a run comes to: a metric of the checkpoint that its user gets, before training and after, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubetune.base.humanize import counted
from kubetune.config.metric_names import full_name, is_greater_better, is_share, main_metric
from kubetune.reporting.look.metric_values import interval as interval_in_words
from kubetune.reporting.look.metric_values import label_of, measured
from kubetune.reporting.reading import RunRecord
from kubetune.rundir import metrics
from kubetune.rundir.intervals import highest_p, mean_interval, p_in_words, wilson

# p-values below this are told as certain; beyond it, the difference may be chance.
CERTAIN = 0.05
# Metrics of answers of which each is right or wrong.
RIGHT_OR_WRONG = ("exact_match", "contains", "regex", "numeric", "label", "json_valid")
_ROUNDING = 1e-6  # of a number of rows
# What a held-out row of a kind of record is.
_UNITS = {"pair": "pair", "graded": "pair", "judged": "answer"}


@dataclass(frozen=True)
class Measured:
    """A metric of the best checkpoint."""

    name: str  # eval_exact_match
    step: int  # 0: the model before training
    after: float
    before: float | None = None
    # 95 %, of the answers that were judged or of the rows that were told apart
    interval: tuple[float, float] | None = None
    test: Mapping[str, Any] | None = None  # the line of the verdict that compares both

    @property
    def label(self) -> str:
        """What people call the metric: exact match."""
        return label_of(self.name)

    @property
    def better(self) -> int:
        """1 if more is better, -1 if less is."""
        return 1 if is_greater_better(self.name) else -1

    @property
    def is_worse(self) -> bool:
        """True if the metric was better before training."""
        return self.before is not None and self.better * (self.after - self.before) < 0

    @property
    def texts(self) -> tuple[str, str]:
        """What it was, "" if that is not known, and what it is, with the sign of a share once: 0, 92 %."""
        return before_and_after(self.name, self.before, self.after)

    @property
    def on_scale(self) -> dict[str, int] | None:
        """Where a share lies on a scale of 0 to 100: before, after and its interval; None for what is no share."""
        if not is_share(self.name) or not 0 <= self.after <= 1:
            return None
        low, high = self.interval or (self.after, self.after)
        before = self.after if self.before is None else self.before
        places = {"before": before, "after": self.after, "low": low, "high": high}
        return {name: round(100 * min(1, max(0, value))) for name, value in places.items()}

    @property
    def interval_text(self) -> str:
        """The interval, such as `85–95.9 %`, "" if there is none."""
        return interval_in_words(self.interval, self.name) if self.interval else ""

    @property
    def confidence(self) -> str:
        """The interval in words, "" if there is none."""
        return f"{self.interval_text} with 95 % confidence" if self.interval else ""


def point(run: RunRecord) -> Measured | None:
    """Return the metric that a run is about, None of a run without evaluations or with a loss of something else."""
    line = run.of_best or (run.measurements[0] if run.base else None)
    if line is None:
        return None
    config = run.config
    name = main_metric(line, config.training.metric_for_best_model, config.task)
    return measure(run, line, name) if name is not None else None


def measure(run: RunRecord, line: Mapping[str, Any], name: str) -> Measured | None:
    """Return a metric of an evaluation, None if it has no number for it."""
    value = line.get(name)
    if value is None or not metrics.is_number(value):
        return None
    after = float(value)
    step = line.get("step") or 0
    test = None
    # A verdict on another checkpoint says nothing of this one.
    if run.verdict.get("step") == step:
        for compared in run.verdict.get("answers") or ():
            if full_name(compared["metric"]) == name:
                test = compared
    interval = _interval(run, line, name, after, test)
    before = run.base.get(name) if step else None
    if test is None and before is not None:
        test = _test_of_shares(before, after, _rows_behind(run, line, name))
    return Measured(name, step, after, before, interval, test)


def _rows_behind(run: RunRecord, line: Mapping[str, Any], name: str) -> int:
    """Return of how many rows a metric is the share that is right; 0 where that is not known, or rows are right in part."""
    rows = (run.plan.eval_rows if run.plan else 0) or 0
    # What was evaluated by hand may be of other rows.
    if "data" in line:
        return 0
    if name == "eval_accuracy":
        return rows
    config = run.config
    asked = config.evaluation.generate
    if name.removeprefix("eval_") not in RIGHT_OR_WRONG or config.draws_answers:
        return 0
    # An evaluation that stops after a time has asked fewer.
    if asked is None or asked.max_seconds is not None:
        return 0
    return min(rows, asked.rows or rows)


def _test_of_shares(before: float, after: float, rows: int) -> dict[str, Any] | None:
    """Return a test of two shares of the same rows, of which nothing is kept but how many were right."""
    were = round(before * rows)
    are = round(after * rows)
    is_share_of_rows = abs(before * rows - were) + abs(after * rows - are) < _ROUNDING
    if not rows or not is_share_of_rows or not (0 <= were <= rows and 0 <= are <= rows):
        return None
    # Where no row can have got worse, or none better, it is the p-value itself.
    is_highest = were > 0 and are < rows and were < rows and are > 0
    p_value = highest_p(were, are, rows)
    return {"p_value": p_value, "test": "McNemar", "rows": rows, "is_highest": is_highest}


def before_and_after(name: str, before: float | None, after: float) -> tuple[str, str]:
    """Return both numbers as the page writes them, the earlier one without the sign that the later one has."""
    text = measured(after, name)
    earlier = "" if before is None else measured(before, name)
    if text.endswith("%"):
        earlier = earlier.removesuffix(" %")
    return earlier, text


def sureness(run: RunRecord, shown: Measured) -> str:
    """Return whether the difference may be chance, by the test of the same checkpoint, and where it was measured."""
    parts = []
    unit = _UNITS.get(run.config.record_kind, "row")
    test = _test(shown, unit)
    if test:
        parts.append(test)
    if shown.interval:
        parts.append(shown.confidence)
    if not test and run.plan and run.plan.eval_rows:
        parts.append(f"of {counted(run.plan.eval_rows, f'held-out {unit}')}")
    parts.append(f"at step {shown.step:,}" if shown.step else "before training")
    if _was_better(run, shown):
        parts.append(f"the best by {chosen_by(run)}")
    data = (run.of_best or {}).get("data")
    if data:
        parts.append(f"on {Path(data).name}")
    where = ", ".join(parts)
    # F1 is no share of rows, so that no test is known of it; the accuracy of the same rows has one.
    accuracy = measure(run, run.of_best or {}, "eval_accuracy") if not test else None
    if accuracy is not None and accuracy.test:
        where += f"; accuracy: {_test(accuracy, unit)}"
    if test or shown.name in run.base or not shown.step:
        return where
    return f"{where}; the model before training was not evaluated"


def chosen_by(run: RunRecord) -> str:
    """Return what people call the metric that chose the best checkpoint, "" if no evaluation has it."""
    name = run.config.training.metric_for_best_model
    is_known = any(metrics.is_number(line.get(name)) for line in run.evaluations)
    return label_of(name) if is_known else ""


def _was_better(run: RunRecord, shown: Measured) -> bool:
    """True if another evaluation than that of the best checkpoint has a better number, as another metric chose it."""
    if shown.name == run.config.training.metric_for_best_model or not chosen_by(run):
        return False
    values = [line.get(shown.name) for line in run.evaluations]
    numbers = [float(value) for value in values if value is not None and metrics.is_number(value)]
    return any(shown.better * (value - shown.after) > 0 for value in numbers)


def _interval(
    run: RunRecord, line: Mapping[str, Any], name: str, value: float, test: Mapping[str, Any] | None
) -> tuple[float, float] | None:
    """Return the 95 % interval of a metric of held-out rows, None where they do not tell it."""
    if test and test.get("after_interval"):
        low, high = test["after_interval"]
        return low, high
    # A share of held-out rows.
    rows = _rows_behind(run, line, name)
    if rows and 0 <= value <= 1:
        return wilson(value, rows)
    rows = (run.plan.eval_rows if run.plan else 0) or 0
    # A mean of numbers whose spread is known.
    spread: Any = line.get("eval_reward_std")
    if rows and name == "eval_reward" and metrics.is_number(spread):
        return mean_interval(value, float(spread), rows)
    return None


def _test(shown: Measured, unit: str) -> str:
    """Return the test of a difference in words, "" if there is none. `unit`: what its rows are called."""
    line = shown.test or {}
    text = test_in_words(line)
    if text and line["p_value"] >= CERTAIN:
        text = f"may be chance: {text}"
    if text and line.get("rows"):
        text += f" on {counted(line['rows'], f'held-out {unit}')}"
    return text


def test_in_words(line: Mapping[str, Any]) -> str:
    """Return `p = 2e-28 by McNemar` of a line that compares two models, "" of one without a test."""
    if not metrics.is_number(line.get("p_value")):
        return ""
    name = line.get("test") or ""
    text = p_in_words(line["p_value"], name, is_highest=line.get("is_highest", False))
    return f"{text} by {name}" if name else text
