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
    charts = [*curve_charts(runs), *machine_charts(runs), *evaluation_charts(runs)]
    if len(runs) == 1:
        vertical_lines = markers(runs[0].incidents)
        return [replace(chart, markers=vertical_lines) for chart in charts]
    return [_name_runs_without(chart, runs) for chart in charts]


def _name_runs_without(chart: Chart, runs: Runs) -> Chart:
    """Return the chart with a sentence that names the runs which have nothing to draw in it."""
    drawn = {line.run for line in chart.lines}
    missing = [name for index, name in enumerate(labels(runs)) if index not in drawn]
    if not missing:
        return chart
    sentence = f"Not recorded: {', '.join(missing)}."
    return replace(chart, about=f"{chart.about} {sentence}".strip())


def markers(incidents: Iterable[Incident]) -> list[dict[str, Any]]:
    """Return a vertical line for each step at which something happened."""
    by_step: dict[int, list[Incident]] = {}
    for incident in incidents:
        if incident.step is not None:
            by_step.setdefault(incident.step, []).append(incident)
    lines = []
    for step in sorted(by_step):
        texts = [f"{incident.what}: {incident.detail}" for incident in by_step[step]]
        is_error = any(incident.is_error for incident in by_step[step])
        lines.append({"step": step, "text": "; ".join(texts), "error": is_error})
    return lines
