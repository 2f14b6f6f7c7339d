"""The charts of a page: which there are, in their order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from kubetune.reporting.chart import Chart
from kubetune.reporting.evaluation_charts import evaluation_charts
from kubetune.reporting.reading import Incident
from kubetune.reporting.run_charts import Runs, curve_charts, labels, machine_charts


def charts_of(runs: Runs) -> list[Chart]:
    """Return the charts of one run, or of several laid over each other."""
    # Lines of several runs would say nothing of whose they are.
    vertical_lines = []
    if len(runs) == 1:
        vertical_lines = markers(runs[0].incidents)
    charts = []
    for chart in (*curve_charts(runs), *machine_charts(runs), *evaluation_charts(runs)):
        about = _with_missing_runs(chart, runs)
        charts.append(replace(chart, about=about, markers=vertical_lines))
    return charts


def _with_missing_runs(chart: Chart, runs: Runs) -> str:
    """Return what the chart says below its title, and which runs have nothing to draw in it."""
    drawn = {line.run for line in chart.lines}
    missing = [name for index, name in enumerate(labels(runs)) if index not in drawn]
    if not missing:
        return chart.about
    return f"{chart.about} Not recorded: {', '.join(missing)}.".strip()


def markers(incidents: Iterable[Incident]) -> list[dict[str, Any]]:
    """Return a vertical line for each step at which something happened."""
    by_step: dict[int, list[Incident]] = {}
    for incident in incidents:
        if incident.step is not None:
            by_step.setdefault(incident.step, []).append(incident)

    # A run that failed and went on from the same step has one line, in the colour of an error.
    lines = []
    for step in sorted(by_step):
        texts = []
        is_error = False
        for incident in by_step[step]:
            texts.append(f"{incident.what}: {incident.detail}")
            is_error = is_error or incident.is_error
        lines.append({"step": step, "text": "; ".join(texts), "error": is_error})

    return lines
