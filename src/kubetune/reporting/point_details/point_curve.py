"""The curve of a run's point, and the order of the charts that come after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kubetune.config.metric_names import full_name, is_share
from kubetune.reporting.chart import Chart, Line
from kubetune.reporting.look.metric_values import label_of
from kubetune.reporting.point import Measured
from kubetune.reporting.reading import POINTS, RunRecord
from kubetune.reporting.run_charts import column
from kubetune.reporting.series import Series

# Measures of steps that a run without evaluations is about.
STEP_MEASURES = ("reward", "divergence", "accuracy", "loss")

# Charts of a task besides its point, by the beginnings of their names. Others are folded.
_CHARTS = {
    "preference": ("accuracy", "margin", "rewards", "loss", "logp"),
    "reward_model": ("accuracy", "margin", "rewards", "loss", "scores", "score-"),
    "distill": ("divergence", "agreement", "cross-entropy", "scores", "score-", "length"),
    "grpo": ("reward", "functions", "groups", "length", "scores", "score-"),
    "sequence_classification": ("accuracy", "loss", "scores", "score-"),
}
_OTHERWISE = ("loss", "scores", "score-", "sources", "rate", "norm")
MOST_CHARTS = 4


def curve_of_point(run: RunRecord, shown: Measured, taught: float | None) -> Chart | None:
    """Return the curve of the point, with the best checkpoint and the level that the teacher reaches."""
    return _with_teacher(_with_best(_best_curve(run, shown.name), shown), taught)


def _best_curve(run: RunRecord, name: str) -> Chart | None:
    """Return the curve of the point, or one of the steps while there are too few evaluations for it."""
    of_point = curve(run, name)
    if of_point is not None and (len(of_point.lines) > 1 or _are_enough(run, name)):
        return of_point
    for key in STEP_MEASURES:
        of_steps = curve(run, key)
        if of_steps is not None:
            return of_steps
    return of_point


def _are_enough(run: RunRecord, name: str) -> bool:
    """True if a metric was evaluated often enough for a curve."""
    evaluations = column(run.measurements, full_name(name), POINTS)
    if not evaluations:
        return False
    is_done = run.exit_status is not None and run.exit_status.state == "done"
    # Two points of a run that goes on, or died, would be a line that nobody measured.
    return _points(evaluations) >= (2 if is_done else 3)


def curve(run: RunRecord, name: str) -> Chart | None:
    """Return the curve of a metric from step 0; None if it has a single point."""
    key = name.removeprefix("eval_")
    lines = []
    trained = run.numbers.curves.get(key)
    if trained is not None:
        lines.append(Line(f"training {label_of(key)}", trained, 0, kind="smooth", band=False))
    evaluated = column(run.measurements, f"eval_{key}", POINTS)
    if evaluated is not None:
        lines.append(Line(f"held-out {label_of(key)}", evaluated, kind="points"))
    if not lines or max(_points(line.series) for line in lines) < 2:
        return None
    unit = "percent" if is_share(key) else "fixed"
    title = label_of(key)[0].upper() + label_of(key)[1:]
    return Chart(key, title, unit, lines, axis=title)


def _points(series: Series) -> int:
    """Return how many values of a series there are."""
    return sum(value is not None for value in series.values)


def _with_best(drawn: Chart | None, shown: Measured) -> Chart | None:
    """Return the curve of the point with a mark at the checkpoint that its user gets."""
    if drawn is None or full_name(drawn.name) != shown.name:
        return drawn
    best = Series([shown.step], [shown.after])
    return replace(drawn, lines=[*drawn.lines, Line("best checkpoint", best, 2, kind="points")])


def _with_teacher(drawn: Chart | None, taught: float | None) -> Chart | None:
    """Return a curve with what the teacher reaches as a level line."""
    if drawn is None or taught is None:
        return drawn
    steps = drawn.lines[0].series.steps
    level = Series([steps[0], steps[-1]], [taught, taught])
    return replace(drawn, lines=[*drawn.lines, Line("teacher", level, 1, dash=1)])


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
