"""What a run comes to: a metric of the checkpoint that its user gets, before training and after, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubetune.base.humanize import counted
from kubetune.config.metric_names import full_name, is_greater_better, is_share, main_metric
from kubetune.reporting.look.metric_values import interval as interval_in_words
from kubetune.reporting.look.metric_values import measured
from kubetune.reporting.reading import RunRecord
from kubetune.rundir import metrics
from kubetune.rundir.intervals import wilson

# p-values below this are told as certain; beyond it, the difference may be chance.
_CERTAIN = 0.05
# What people call a metric whose name says too little.
_LABELS = {"reward_std": "spread of rewards", "divergence": "divergence from the teacher"}
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
        """The interval, such as `95 %: 85–95.9 %`, "" if there is none."""
        return f"95 %: {interval_in_words(self.interval, self.name)}" if self.interval else ""


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
    interval = None
    if test and test.get("after_interval"):
        low, high = test["after_interval"]
        interval = (low, high)
    elif name == "eval_accuracy" and 0 <= after <= 1 and run.plan and run.plan.eval_rows:
        # A share of held-out rows.
        interval = wilson(after, run.plan.eval_rows)
    before = run.base.get(name) if step else None
    return Measured(name, step, after, before, interval, test)


def before_and_after(name: str, before: float | None, after: float) -> tuple[str, str]:
    """Return both numbers as the page writes them, the earlier one without the sign that the later one has."""
    text = measured(after, name)
    earlier = "" if before is None else measured(before, name)
    if text.endswith("%"):
        earlier = earlier.removesuffix(" %")
    return earlier, text


def label_of(name: str) -> str:
    """Return what people call a metric: "exact match" for eval_exact_match."""
    key = name.removeprefix("eval_")
    return _LABELS.get(key, key.replace("_", " ").replace("f1", "F1"))


def sureness(run: RunRecord, shown: Measured) -> str:
    """Return whether the difference may be chance, by the test of the same checkpoint, and where it was measured."""
    where = f"at step {shown.step:,}" if shown.step else "before training"
    data = (run.of_best or {}).get("data")
    if data:
        where += f", on {Path(data).name}"
    if shown.test and metrics.is_number(shown.test.get("p_value")):
        return f"{_test(shown.test)}, {where}"
    where = _interval(run, shown) + where
    if shown.name in run.base or not shown.step:
        return where
    return f"{where}; the model before training was not evaluated"


def _interval(run: RunRecord, shown: Measured) -> str:
    """Return the 95 % interval of a share of held-out rows, "" if there is none.

    "95 %: 92.6–100 % of 48 held-out pairs, ". Of F1, which is no share of rows, the interval of the accuracy.
    """
    of_what = ""
    if shown.name.startswith("eval_f1") and run.of_best:
        accuracy = measure(run, run.of_best, "eval_accuracy")
        if accuracy is None:
            return ""
        shown = accuracy
        of_what = "accuracy "
    rows = run.plan.eval_rows if run.plan else 0
    if not shown.interval or not rows:
        return ""
    unit = _UNITS.get(run.config.record_kind, "row")
    return f"{of_what}{shown.interval_text} of {counted(rows, f'held-out {unit}')}, "


def _test(line: Mapping[str, Any]) -> str:
    """Return a test of significance in words."""
    chance = "" if line["p_value"] < _CERTAIN else "may be chance: "
    text = f"{chance}p = {line['p_value']:.2g}"
    if line.get("test"):
        text += f" by {line['test']}"
    if line.get("rows"):
        text += f" on {counted(line['rows'], 'held-out row')}"
    return text
