"""Charts of the metrics of evaluations that no curve of the training goes with: losses of sources, scores."""

from __future__ import annotations

from types import NoneType

from kubetune.reporting.chart import Chart
from kubetune.reporting.reading import OF_SOURCE, RunRecord, metric_keys
from kubetune.reporting.run_charts import Runs, column, line_of, loss_axis, points_of
from kubetune.reporting.series import Series

# Lines that one chart can hold and still be read. More go to further charts.
_MOST_LINES = 8

# A lone run's scores are drawn from so many evaluations on; its table has fewer of them at a glance.
_LEAST_EVALUATIONS = 3

# Index of a run, with its series of one metric.
SeriesOfRuns = list[tuple[int, Series]]


def evaluation_charts(runs: Runs) -> list[Chart]:
    """Return the losses of sources, and the other metrics: shares together, each other one alone."""
    # What was measured, by the key in metrics.jsonl. Not every run need have each metric.
    metrics: dict[str, SeriesOfRuns] = {}
    for index, run in enumerate(runs):
        for key in metric_keys(run.evaluations):
            series = _series(run, key, points_of(len(runs)))
            if series is not None:
                metrics.setdefault(key, []).append((index, series))

    # The same by the name that the page shows: `eval_exact_match` is "exact match".
    sources: dict[str, SeriesOfRuns] = {}
    shares: dict[str, SeriesOfRuns] = {}
    others: dict[str, SeriesOfRuns] = {}
    for key, parts in metrics.items():
        if key.startswith(OF_SOURCE):
            sources[key.removeprefix(OF_SOURCE)] = parts
            continue
        name = key.removeprefix("eval_").replace("_", " ")
        if _are_shares(parts):
            shares[name] = parts
        else:
            others[name] = parts

    title = "Evaluation loss by source"
    charts = _charts_of(
        runs,
        sources,
        "sources",
        title,
        "fixed",
        loss_axis(runs),
    )
    if len(runs) == 1 and len(runs[0].evaluations) < _LEAST_EVALUATIONS:
        return charts
    charts += _charts_of(
        runs,
        shares,
        "scores",
        "Evaluation scores",
        "percent",
    )
    for name, parts in others.items():
        charts += _charts_of(runs, {name: parts}, f"score-{name}", "", "fixed")
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


def _charts_of(
    runs: Runs,
    metrics: dict[str, SeriesOfRuns],
    chart_name: str,
    title: str,
    unit: str,
    axis: str = "",
) -> list[Chart]:
    """Return the metrics as points, in as many charts as are needed for all to be read.

    Example: ten metrics of a lone run make charts of 8 and 2 lines; of two runs, charts of 4, 4 and 2
    metrics with two lines each. A metric that is alone in the end gives its chart its name.
    """
    names = list(metrics)
    metrics_of_a_chart = max(1, _MOST_LINES // len(runs))
    is_split = len(names) > metrics_of_a_chart
    charts = []
    for part, begin in enumerate(range(0, len(names), metrics_of_a_chart), 1):
        names_of_chart = names[begin : begin + metrics_of_a_chart]

        # A metric has the same dashes in the lines of all runs.
        lines = []
        for number, name in enumerate(names_of_chart):
            for index, series in metrics[name]:
                lines.append(line_of(runs, index, name, series, number, kind="points"))

        shown_title = f"{title}, part {part}" if is_split else title
        if chart_name != "sources" and len(names_of_chart) == 1:
            shown_title = f"Evaluation: {names_of_chart[0]}"
        shown_axis = axis or ", ".join(names_of_chart[:3])
        charts.append(Chart(f"{chart_name}-{part}", shown_title, unit, lines, axis=shown_axis))

    return charts
