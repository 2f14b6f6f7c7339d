"""The point of a run: the number that its task is about, before and after, how sure that is, and its curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kubetune.base.humanize import counted, duration, number, share, short
from kubetune.config.metric_names import full_name, is_greater_better, is_share, main_metric
from kubetune.reporting import cards
from kubetune.reporting.chart import Chart, Line
from kubetune.reporting.look.measured import interval, measured
from kubetune.reporting.reading import POINTS, RunRecord
from kubetune.reporting.run_charts import column
from kubetune.reporting.series import Series
from kubetune.rundir import metrics
from kubetune.rundir.intervals import wilson

# p-values below this are told as certain; beyond it, the difference may be chance.
_CERTAIN = 0.05
# What stands beside the point, where an evaluation has it.
_BESIDE = ("reward_std", "reward", "exact_match", "margin", "f1_macro", "accuracy", "loss")
_MOST_BESIDE = 2
# What a task is about, where main_metric would name something else first.
_OF_TASK = {
    "sequence_classification": ("eval_f1", "eval_f1_macro", "eval_f1_micro"),
    "distill": ("eval_divergence",),
    "grpo": ("eval_reward",),
}
# What people call a metric whose name says too little.
_LABELS = {"reward_std": "spread of rewards", "divergence": "divergence from the teacher"}
# Measures of steps that a run without evaluations is about.
_OF_STEPS = ("reward", "divergence", "accuracy", "loss")
_BESIDE_STEPS = {"divergence": ("agreement",), "accuracy": ("margin",)}

# Charts of a task besides its point, by the beginnings of their names. Others are folded.
_CHARTS = {
    "preference": ("accuracy", "rewards", "loss", "logp"),
    "reward_model": ("accuracy", "rewards", "loss", "logp"),
    "distill": ("divergence", "agreement", "loss", "length"),
    "grpo": ("reward", "functions", "groups", "length"),
}
_OTHERWISE = ("loss", "scores", "score-", "sources", "rate", "norm")
MOST_CHARTS = 4


@dataclass(frozen=True)
class Value:
    """A number, with what it was before."""

    label: str
    before: str  # "" where it is not known
    after: str


@dataclass(frozen=True)
class Hero:
    """What the page of a run says first."""

    value: Value
    sure: str  # how sure the difference is, and where it was measured
    is_worse: bool
    beside: Sequence[Value]
    curve: Chart | None
    example: Mapping[str, str] | None = None  # asked, before, after: of an answer that got better


def hero(run: RunRecord) -> Hero | None:
    """Return the point of a run, or None if it has neither an evaluation nor a step."""
    line = cards.best_evaluation(run) or (run.evaluations[-1] if run.evaluations else None)
    if line is None and run.base:
        line = run.measurements[0]
    name = _point_of(run, line) if line is not None else None
    # Distillation is about its divergence, which steps measure; the loss of an evaluation is another measure.
    is_beside_the_point = run.config.task == "distill" and name == "eval_loss"
    if line is None or name is None or line.get(name) is None or is_beside_the_point:
        return _of_steps(run)

    before = run.base.get(name) if line["step"] else None
    is_worse = False
    if before is not None:
        is_worse = line[name] < before if is_greater_better(name) else line[name] > before
    beside: list[Value] = []
    for measure in _BESIDE:
        key = f"eval_{measure}"
        if key != name and metrics.is_number(line.get(key)) and len(beside) < _MOST_BESIDE:
            beside.append(_value(key, run.base.get(key) if line["step"] else None, line[key]))
    value = _value(name, before, line[name])
    if run.config.task == "reward_model" and name == "eval_accuracy":
        value = replace(value, label="agreement with the preferred answers")
    return Hero(
        value,
        _sureness(run, name, line["step"]),
        is_worse,
        beside,
        _curve(run, name),
        _example(run, name),
    )


def _point_of(run: RunRecord, line: Mapping[str, Any]) -> str | None:
    """Return the metric that a run is about: its user's choice, that of its task, or what the evaluation has."""
    best_by = run.config.training.metric_for_best_model
    # A run by rewards is about its reward, whatever chooses its checkpoint.
    if best_by == "eval_loss" or run.config.task == "grpo":
        for name in _OF_TASK.get(run.config.task, ()):
            if metrics.is_number(line.get(name)):
                return name
    return main_metric(line, best_by)


def _of_steps(run: RunRecord) -> Hero | None:
    """Return the point of a run by its steps: reward, divergence, accuracy or loss in the first and the last of them."""
    for key in _OF_STEPS:
        ends = _ends(run, key)
        if ends is None:
            continue
        first, last = ends
        value = _value(key, first, last)
        label = f"training {value.label}" if key == "loss" else value.label
        is_worse = first is not None and (last < first if is_greater_better(key) else last > first)
        sure = "of the only step" if first is None else "mean of the first and of the last steps"
        if not run.evaluations:
            sure += "; nothing was held out to measure it"
        beside = []
        for other in _BESIDE_STEPS.get(key, ()):
            ends = _ends(run, other)
            if ends is not None:
                beside.append(_value(other, *ends))
        # What was held out says something else of the same model.
        held_out = run.evaluations[-1].get("eval_token_accuracy") if run.evaluations else None
        if isinstance(held_out, int | float):
            first_held_out = run.base.get("eval_token_accuracy")
            value_held_out = _value("eval_token_accuracy", first_held_out, held_out)
            beside.append(replace(value_held_out, label="held-out token accuracy"))
        return Hero(replace(value, label=label), sure, is_worse, beside, _curve(run, key))
    return None


def _ends(run: RunRecord, key: str) -> tuple[float | None, float] | None:
    """Return a measure of the first steps and of the last; one alone of a single step, None of none."""
    series = run.numbers.curves.get(key)
    values = [value for value in series.values if value is not None] if series else []
    if not values:
        return None
    if len(values) == 1:
        return None, values[0]
    # A step is noisy, so that a tenth of them stands for the beginning and for the end.
    some = max(1, len(values) // 10)
    return sum(values[:some]) / some, sum(values[-some:]) / some


def _value(name: str, before: float | None, after: float) -> Value:
    """Return a metric's number as the page writes it, such as 0 → 92 %."""
    text = measured(after, name)
    # The sign once is enough.
    earlier = "" if before is None else measured(before, name)
    if text.endswith("%"):
        earlier = earlier.removesuffix(" %")
    return Value(_label(name), earlier, text)


def _label(name: str) -> str:
    """Return what people call a metric: "exact match" for eval_exact_match."""
    key = name.removeprefix("eval_")
    return _LABELS.get(key, key.replace("_", " ").replace("f1", "F1"))


def _sureness(run: RunRecord, name: str, step: int) -> str:
    """Return whether the difference may be chance, by the test of the same checkpoint, and where it was measured."""
    where = "before training" if not step else f"at step {step:,}"
    if run.verdict.get("step") == step:
        for line in run.verdict.get("answers") or ():
            if full_name(line["metric"]) == name and metrics.is_number(line.get("p_value")):
                return f"{_test(line)}, {where}"
    where = _interval(run, name, step) + where
    if name in run.base or not step:
        return where
    return f"{where}; the model before training was not evaluated"


def _interval(run: RunRecord, name: str, step: int) -> str:
    """Return the 95 % interval of a share of held-out rows, "" if there is none.

    "95 %: 92.6–100 % of 48 held-out pairs, ". Of F1, which is no share of rows, the interval of the accuracy.
    """
    of_what = ""
    if name.startswith("eval_f1"):
        name = "eval_accuracy"
        of_what = "accuracy "
    rows = run.plan.eval_rows if run.plan else None
    parts = [line.get(name) for line in run.measurements if line["step"] == step]
    part = parts[-1] if parts else None
    if name != "eval_accuracy" or not rows or not isinstance(part, int | float):
        return ""
    ends = interval(wilson(part, rows), name)
    unit = "row" if run.config.task == "sequence_classification" else "pair"
    return f"{of_what}95 %: {ends} of {counted(rows, f'held-out {unit}')}, "


def _test(line: Mapping[str, Any]) -> str:
    """Return a test of significance in words."""
    chance = "" if line["p_value"] < _CERTAIN else "may be chance: "
    text = f"{chance}p = {line['p_value']:.2g}"
    if line.get("test"):
        text += f" by {line['test']}"
    if line.get("rows"):
        text += f" on {counted(line['rows'], 'held-out row')}"
    return text


def _curve(run: RunRecord, name: str) -> Chart | None:
    """Return the curve of a metric from step 0; None if it has a single point."""
    key = name.removeprefix("eval_")
    lines = []
    trained = run.numbers.curves.get(key)
    if trained is not None:
        lines.append(Line(f"training {_label(key)}", trained, 0, kind="smooth", band=False))
    evaluated = column(run.measurements, f"eval_{key}", POINTS)
    if evaluated is not None:
        colour = len(lines)
        lines.append(Line(f"evaluation {_label(key)}", evaluated, colour, kind="points"))
    if not lines or max(_points(line.series) for line in lines) < 2:
        return None
    unit = "percent" if is_share(key) else "fixed"
    return Chart(key, _label(name), unit, lines, axis=_label(name))


def _points(series: Series) -> int:
    """Return how many values of a series there are."""
    return sum(value is not None for value in series.values)


def _example(run: RunRecord, name: str) -> dict[str, str] | None:
    """Return an answer that got better, by this metric if one did, else by another; None if none is kept."""
    turned = run.verdict.get("turned") or {}
    for _, sides in sorted(turned.items(), key=lambda item: full_name(item[0]) != name):
        for line in sides.get("gained") or ():
            if isinstance(line.get("before"), str) and isinstance(line.get("answer"), str):
                return {
                    "asked": str(line["prompt"]),
                    "before": line["before"],
                    "after": line["answer"],
                }
    return None


def facts_line(run: RunRecord) -> list[str]:
    """Return everything else that one wants to know first, as short texts for one line."""
    totals = run.numbers.totals
    steps = cards.last_step(run)
    planned = run.plan.num_steps if run.plan else 0
    facts = [f"{steps:,} of {planned:,} steps" if planned else counted(steps, "step")]
    if totals.last.get("loss") is not None:
        facts.append(
            f"training loss {number(totals.first.get('loss'))} → {number(totals.last['loss'])}"
        )
    seconds, tokens, trained = cards.work_done(run)
    if tokens:
        facts.append(f"{short(tokens)} tokens")
        if run.config.task != "sequence_classification":
            facts.append(f"{share(trained / tokens)} of them trained")
    if seconds:
        facts += [f"{duration(seconds)} in steps", f"{number(tokens / seconds)} tokens/s"]
    return facts


def in_order(
    charts: Sequence[Chart], task: str, point: Chart | None
) -> tuple[list[Chart], list[Chart]]:
    """Return the charts of a lone run by their weight, the curve of its point first, and those of a single point.

    Those of the task come next; the template folds all but the first `MOST_CHARTS` of them.
    """
    single = [chart for chart in charts if max(_points(line.series) for line in chart.lines) < 2]
    drawn = [chart for chart in charts if chart not in single]
    ordered = [] if point is None else [point]
    for beginning in _CHARTS.get(task, _OTHERWISE):
        for chart in drawn:
            is_of_task = chart.name == beginning or (
                beginning.endswith("-") and chart.name.startswith(beginning)
            )
            if is_of_task and chart not in ordered:
                ordered.append(chart)
    rest = [chart for chart in drawn if chart not in ordered]
    return [*ordered, *rest], single
