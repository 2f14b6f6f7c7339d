"""Charts of metrics that only evaluations have: losses of sources, scores."""

from __future__ import annotations

from kubetune.reporting.chart import Chart, Line
from kubetune.reporting.look.metric_values import label_of
from kubetune.reporting.reading import OF_SOURCE, metric_keys
from kubetune.reporting.run_charts import (
    Runs,
    column,
    has_own_loss,
    line_of,
    loss_axis,
    points_of,
)
from kubetune.reporting.series import Series

# The series of one metric, by index of the run.
SeriesOfRuns = dict[int, Series]


def evaluation_charts(runs: Runs, apart: str = "") -> list[Chart]:
    """Return the losses of sources in one chart, a lone run's shares in one, and each other metric in its own.

    `apart`: a metric that is shown elsewhere already.
    """
    # By chart, and by the name that the page shows: `eval_exact_match` is "exact match".
    sources: dict[str, SeriesOfRuns] = {}
    scores: dict[str, SeriesOfRuns] = {}
    others: dict[str, SeriesOfRuns] = {}
    for key, of_runs in _metrics(runs).items():
        if key == apart:
            continue
        name = label_of(key)
        if key.startswith(OF_SOURCE):
            source = key.removeprefix(OF_SOURCE)
            sources[source] = of_runs
        elif _are_shares(key, of_runs):
            scores[name] = of_runs
        else:
            others[name] = of_runs

    charts = []
    if sources:
        title = "Held-out loss by source"
        axis = loss_axis(runs)
        lines = _lines(runs, sources)
        charts.append(Chart("sources", title, "fixed", lines, axis=axis))
    # Several runs of several metrics would be more lines than can be told apart.
    if len(runs) == 1 and len(scores) > 1:
        axis = ", ".join(scores)
        lines = _lines(runs, scores)
        charts.append(Chart("scores", "Held-out scores", "percent", lines, axis=axis))
        scores = {}
    for unit, of_unit in (("percent", scores), ("fixed", others)):
        for name, of_runs in of_unit.items():
            title = name[0].upper() + name[1:]
            lines = _lines(runs, {name: of_runs})
            charts.append(Chart(f"score-{name}", title, unit, lines))
    return charts


def _metrics(runs: Runs) -> dict[str, SeriesOfRuns]:
    """Return what was measured, by key. Not every run need have each metric."""
    points = points_of(len(runs))
    metrics: dict[str, SeriesOfRuns] = {}
    for index, run in enumerate(runs):
        for key in metric_keys(run.measurements):
            # Other charts show these.
            if key == "eval_perplexity" or (key == "eval_loss" and not has_own_loss(run)):
                continue
            if key != "eval_loss" and key.removeprefix("eval_") in run.numbers.curves:
                continue
            series = column(run.measurements, key, points)
            if series is not None:
                metrics.setdefault(key, {})[index] = series
    return metrics


# Ends of names of what is no share, though its values may lie between 0 and 1.
_NO_SHARES = ("loss", "reward", "_std", "margin", "divergence", "mae")


def _are_shares(key: str, of_runs: SeriesOfRuns) -> bool:
    """True if a metric is a share by its name, or has an unknown name and values from -1 (a correlation) to 1."""
    if key.endswith(_NO_SHARES):
        return False
    for series in of_runs.values():
        if any(value is not None and not -1 <= value <= 1 for value in series.values):
            return False
    return True


def _lines(runs: Runs, metrics: dict[str, SeriesOfRuns]) -> list[Line]:
    """Return the points of a chart. A metric has the same dashes in the lines of all runs."""
    lines = []
    for number, (name, of_runs) in enumerate(metrics.items()):
        for index, series in of_runs.items():
            line = line_of(runs, index, name, series, number, kind="points")
            lines.append(line)
    return lines
