"""The pages of runs: one run, or several compared. Each is one HTML file that asks for nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from kubetune.base.files import write_atomic
from kubetune.base.humanize import counted, number, share, size
from kubetune.base.logs import scrub
from kubetune.reporting.chart import Chart, Line
from kubetune.reporting.compared.charts import compared_charts, without_comparison
from kubetune.reporting.compared.run_comparison import comparison_facts
from kubetune.reporting.evaluation_charts import evaluation_charts
from kubetune.reporting.hero import Hero, hero
from kubetune.reporting.point_details.point_curve import MOST_CHARTS, in_order
from kubetune.reporting.reading import Incident, RunRecord, read_run
from kubetune.reporting.rendering import render
from kubetune.reporting.run_charts import Runs, curve_charts, labels, machine_charts, points_of
from kubetune.reporting.run_page import run_facts

# Axes that charts can be drawn over, other than steps: name, and title.
AXES = {"tokens": "tokens", "epoch": "epochs", "time": "time in steps"}
_OF_AXES = {"time": "hours"}  # the name in `Numbers.axes`, if that is another

# A function that writes a number of a chart as text.
Writer = Callable[[Any], str]


def write_report(
    run_dirs: Sequence[Path],
    output: Path,
) -> Path:
    """Write the page of one run, or of several compared, and return its path.

    Raise ConfigError for a folder that is no run directory.
    """
    # More runs on a page have fewer points each, so that it stays small.
    points = points_of(len(run_dirs))
    runs = [read_run(folder, points) for folder in run_dirs]
    template, facts = page_of(runs)
    # A run may have printed or recorded a secret, such as the command that started it.
    write_atomic(output, scrub(render(template, **facts)))
    return output


def page_of(runs: Sequence[RunRecord]) -> tuple[str, dict[str, Any]]:
    """Return the template of the page of these runs, and its facts."""
    if len(runs) > 1:
        charts, by_run, not_drawn = compared_charts(charts_of(runs), runs)
        drawn, hidden, why = without_comparison(charts)
        first = by_run or drawn[:MOST_CHARTS]
        more = drawn if by_run else drawn[MOST_CHARTS:]
        count = len(first)
        end = count + len(more)
        what = counted(len(more), "chart") + " of schedule, speed and memory"
        if not by_run:
            what = counted(len(more), "more chart")
        return "compare.html", {
            "not_drawn": not_drawn,
            **_drawn([*first, *more, *hidden], runs),
            **comparison_facts(runs),
            "folded_from": count,
            # The first chart of each fold, its end, and its title.
            "folds": [(count, end, what), (end, end + len(hidden), why)],
        }

    facts = run_facts(runs[0])
    charts, single, first_chart = _charts_of_one(runs[0], facts["hero"])
    shown = {
        "single": [_single_value(chart) for chart in single],
        "first_chart": first_chart,
        "folded_from": first_chart + MOST_CHARTS,
    }
    return "run.html", {**_drawn(charts, runs), **facts, **shown}


def _charts_of_one(run: RunRecord, of_run: Hero | None) -> tuple[list[Chart], list[Chart], int]:
    """Return the charts of a lone run, the chart of its point first, charts of a single value, and 1 if it has a point."""
    charts = charts_of([run])
    curve = of_run.curve if of_run else None
    if curve is not None:
        # The task's own chart of this measure shows more: single steps around the smoothed line, and their band.
        of_measure = [chart for chart in charts if chart.name == curve.name]
        curve = of_measure[0] if of_measure else replace(curve, markers=markers(run))
        charts = charts_of([run], apart=f"eval_{curve.name}")
    ordered, single = in_order(charts, run.config.task, curve)
    return ordered, single, int(curve is not None)


def _single_value(chart: Chart) -> dict[str, str]:
    """Return what a chart of a single point says, as a number with its name."""
    write = _writer(chart)
    lines = chart.lines
    texts = []
    for line in lines:
        values = [value for value in line.series.values if value is not None]
        if values:
            texts.append(
                write(values[-1]) if len(lines) == 1 else f"{line.label} {write(values[-1])}"
            )
    return {"title": chart.title, "text": ", ".join(texts)}


def _writer(chart: Chart) -> Writer:
    """Return the function that writes a number of a chart."""
    writers: dict[str, Writer] = {"bytes": size, "percent": share}
    return writers.get(chart.unit, number)


def curves_of(runs: Sequence[RunRecord], most: int) -> dict[str, Any]:
    """Return the first charts of these runs, at most so many, for a template that shows nothing else."""
    if len(runs) > 1:
        shared, by_run, _ = compared_charts(charts_of(runs), runs)
        charts = by_run or shared[:most]
    else:
        charts = _charts_of_one(runs[0], hero(runs[0]))[0][:most]
    return {**_drawn(charts, runs), "count": len(runs)}


def _drawn(charts: Sequence[Chart], runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Return charts as a template shows them, and their numbers as charts.js draws them."""
    data = {
        "charts": [chart.to_json() for chart in charts],
        "axes": [run.numbers.axes for run in runs],  # of each run, by name
    }
    # Runs laid over each other need the axis of all of them.
    axes = {}
    for name, title in AXES.items():
        if all(_OF_AXES.get(name, name) in run.numbers.axes for run in runs):
            axes[name] = title

    # Inside of a script element, "</script>" in a label would end it.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return {
        "charts": [_chart_facts(chart) for chart in charts],
        "axes": axes,
        "data": Markup(text),
        "has_charts": bool(charts),
    }


def charts_of(runs: Runs, apart: str = "") -> list[Chart]:
    """Return the charts of one run, or of several laid over each other. `apart`: a metric that is shown elsewhere."""
    # Lines of several runs would not say to which run they belong.
    vertical_lines = []
    if len(runs) == 1:
        vertical_lines = markers(runs[0])
    charts = []
    for chart in (*curve_charts(runs), *machine_charts(runs), *evaluation_charts(runs, apart)):
        about = _with_missing_runs(chart, runs)
        lines = _named_by_run(chart.lines, runs)
        charts.append(replace(chart, lines=lines, about=about, markers=vertical_lines))
    return charts


def _named_by_run(lines: Sequence[Line], runs: Runs) -> Sequence[Line]:
    """Return lines of one measure, which the title of their chart names, with the names of their runs instead."""
    measures = {line.label.removeprefix(f"{line.mark} ") for line in lines}
    if len(runs) == 1 or len(measures) > 1:
        return lines
    names = labels(runs)
    return [replace(line, label=f"{line.mark} {names[line.run]}") for line in lines]


def _with_missing_runs(chart: Chart, runs: Runs) -> str:
    """Return what the chart says below its title, and which runs have nothing to draw in it."""
    drawn = {line.run for line in chart.lines}
    missing = [name for index, name in enumerate(labels(runs)) if index not in drawn]
    if not missing:
        return chart.about
    return f"{chart.about} Not recorded: {', '.join(missing)}.".strip()


def markers(run: RunRecord) -> list[dict[str, Any]]:
    """Return a vertical line for each step at which something happened."""
    by_step: dict[int, list[Incident]] = {}
    for incident in run.incidents:
        step = incident.step
        # Who is killed writes no step: a death that nothing followed was at the last one.
        if step is None and incident is run.incidents[-1]:
            step = run.numbers.totals.steps
        if step is not None:
            by_step.setdefault(step, []).append(incident)

    # A run that failed and continued from the same step has one line, in the colour of an error.
    lines = []
    for step in sorted(by_step):
        texts = []
        is_error = False
        for incident in by_step[step]:
            texts.append(f"{incident.what}: {incident.detail}")
            is_error = is_error or incident.is_error
        lines.append({"step": step, "text": "; ".join(texts), "error": is_error})

    return lines


def _chart_facts(chart: Chart) -> dict[str, Any]:
    """Return what the page shows around a chart, and in its place if no script runs."""
    heading, table = chart.table()
    write = _writer(chart)
    rows = []
    # The first column counts steps, the others are values of the chart's unit.
    for step, *values in table:
        rows.append([number(step), *(write(value) for value in values)])
    return {
        "name": chart.name,
        "title": chart.title,
        "about": chart.about,
        "summary": _summary(chart, write),
        "heading": heading,
        "rows": rows,
        "markers": chart.markers,
    }


def _summary(chart: Chart, write: Writer) -> str:
    """Return the chart in words, for readers who do not see it."""
    sentences = [_line_summary(line, write) for line in chart.lines]
    return "; ".join(filter(None, sentences)) + "."


def _line_summary(line: Line, write: Writer) -> str:
    """Return a line's first, last and lowest value in words, or "" if it has none."""
    points = []
    for step, value in zip(line.series.steps, line.series.values, strict=True):
        if value is not None:
            points.append((step, value))
    if not points:
        return ""
    first_step, first = points[0]
    last_step, last = points[-1]
    low_step, low = min(points, key=lambda point: point[1])
    return (
        f"{line.label}: {write(first)} at step {first_step:,}, {write(last)} at step "
        f"{last_step:,}, lowest {write(low)} at step {low_step:,}"
    )
