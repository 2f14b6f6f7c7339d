"""Charts of several runs: which of them compare, in which order, and the text in their place if no chart does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kubetune.reporting.chart import Chart
from kubetune.reporting.look.metric_values import label_of
from kubetune.reporting.point import point, sureness
from kubetune.reporting.point_details.point_curve import curve, in_order
from kubetune.reporting.run_charts import Runs, labels

# Charts that say how well a run learns, beginnings of their names.
_OF_LEARNING = (
    "loss", "logp", "score-", "accuracy", "margin", "reward", "sources", "divergence", "cross-entropy", "agreement"
)  # fmt: skip


def compared_charts(charts: Sequence[Chart], runs: Runs) -> tuple[list[Chart], list[Chart], str]:
    """Return the charts that compare runs, one for each run if they learn different things, and what is left out."""
    same_task = len({run.config.task for run in runs}) == 1
    kept = []
    dots = []
    for chart in charts:
        # What runs of different tasks learn is on a chart of each of them.
        if chart.name.startswith(_OF_LEARNING) and not same_task:
            continue
        # Points of one evaluation each make no curve; the table of results has them.
        if chart.name != "loss" and max(len(line.series.steps) for line in chart.lines) < 2:
            dots.append(chart.title)
        else:
            kept.append(chart)
    task = runs[0].config.task if same_task else ""
    ordered, _ = in_order(kept, task, _of_point(kept, runs) if same_task else None)
    not_drawn = f"Not drawn, as each run has one value: {', '.join(dots)}." if dots else ""
    return ordered, [] if same_task else _own_charts(runs), not_drawn


def _of_point(charts: Sequence[Chart], runs: Runs) -> Chart | None:
    """Return the chart of the metric that all runs are about, None if they are about several."""
    names = {shown.name if shown else None for shown in map(point, runs)}
    name = names.pop()
    if names or name is None:
        return None
    known = (name.removeprefix("eval_"), f"score-{label_of(name)}")
    return next((chart for chart in charts if chart.name in known), None)


def _own_charts(runs: Runs) -> list[Chart]:
    """Return a chart for each run of the metric that it is about: each is compared with its own beginning."""
    charts = []
    for index, (run, name) in enumerate(zip(runs, labels(runs), strict=True)):
        shown = point(run)
        chart = curve(run, shown.name) if shown else None
        if shown is None or chart is None:
            continue
        before, after = shown.texts
        lines = [replace(line, colour=index, run=index) for line in chart.lines]
        # No line breaks within a value.
        value = (f"{before} → {after}" if before else after).replace(" ", "\u00a0")
        title = f"{name}: {shown.label} {value}"
        charts.append(
            replace(
                chart, title=title, about=sureness(run, shown), lines=lines, name=f"own-{index}"
            )
        )
    return charts


_MOST_TITLES = 3  # that a line on hidden charts names


def without_comparison(charts: Sequence[Chart]) -> tuple[list[Chart], list[Chart], str]:
    """Return the charts in which runs differ, those that are of one run or the same in all, and a line on the latter."""
    drawn = []
    alone = []
    alike = []
    for chart in charts:
        shown = {(line.run, line.dash): line.series for line in chart.lines}
        first = chart.lines[0].run
        if all(line.run == first for line in chart.lines):
            alone.append(chart)
        elif all(series == shown.get((first, dash)) for (_, dash), series in shown.items()):
            alike.append(chart)
        else:
            drawn.append(chart)
    parts = []
    for part, what in ((alike, "the same in all"), (alone, "of one run only")):
        if part:
            titles = ", ".join(chart.title for chart in part[:_MOST_TITLES])
            parts.append(
                f"{len(part)} {what} ({titles}{', …' if len(part) > _MOST_TITLES else ''})"
            )
    return drawn, [*alike, *alone], f"Hidden charts: {'; '.join(parts)}"
