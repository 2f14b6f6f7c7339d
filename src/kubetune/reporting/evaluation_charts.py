"""Charts of metrics that only evaluations have: losses of sources, scores."""

from __future__ import annotations

from types import NoneType

from kubetune.reporting.chart import Chart, Line
from kubetune.reporting.reading import OF_SOURCE, RunRecord, metric_keys
from kubetune.reporting.run_charts import Runs, column, line_of, loss_axis, points_of
from kubetune.reporting.series import Series

# Index of a run, with its series of one metric.
SeriesOfRuns = list[tuple[int, Series]]


def evaluation_charts(runs: Runs) -> list[Chart]:
    """Return the losses of sources in one chart, shares in one, and each other metric alone."""
    # What was measured, by the key in metrics.jsonl. Not every run need have each metric.
    metrics: dict[str, SeriesOfRuns] = {}
    for index, run in enumerate(runs):
        for key in metric_keys(run.evaluations):
            series = _series(run, key, points_of(len(runs)))
            if series is not None:
                metrics.setdefault(key, []).append((index, series))

    # The same metrics by chart and by the name that the page shows: `eval_exact_match` is "exact match".
    sources: dict[str, SeriesOfRuns] = {}
    scores: dict[str, SeriesOfRuns] = {}
    charts = []
    for key, parts in metrics.items():
        name = key.removeprefix("eval_").replace("_", " ")
        if key.startswith(OF_SOURCE):
            sources[key.removeprefix(OF_SOURCE)] = parts
        elif _are_shares(parts):
            scores[name] = parts
        else:
            chart = Chart(
                f"score-{name}", f"Evaluation: {name}", "fixed", _lines(runs, {name: parts})
            )
            charts.append(chart)
    if scores:
        axis = ", ".join(scores)
        lines = _lines(runs, scores)
        charts.insert(0, Chart("scores", "Evaluation scores", "percent", lines, axis=axis))
    if sources:
        axis = loss_axis(runs)
        lines = _lines(runs, sources)
        charts.insert(0, Chart("sources", "Evaluation loss by source", "fixed", lines, axis=axis))
    return charts


def _series(run: RunRecord, key: str, points: int) -> Series | None:
    """Return the values of a metric, or None if another chart shows it, or it is not made of numbers."""
    if key in ("eval_loss", "eval_perplexity") or key.removeprefix("eval_") in run.numbers.curves:
        return None

    numbers = []
    for line in run.evaluations:
        if isinstance(line.get(key), int | float | NoneType):
            numbers.append(line)
    return column(numbers, key, points)


def _are_shares(parts: SeriesOfRuns) -> bool:
    """True if all values lie between -1 (a coefficient of correlation) and 1."""
    for _, series in parts:
        if any(value is not None and not -1 <= value <= 1 for value in series.values):
            return False
    return True


def _lines(runs: Runs, metrics: dict[str, SeriesOfRuns]) -> list[Line]:
    """Return the points of a chart. A metric has the same dashes in the lines of all runs."""
    lines = []
    for number, (name, parts) in enumerate(metrics.items()):
        for index, series in parts:
            lines.append(line_of(runs, index, name, series, number, kind="points"))
    return lines
