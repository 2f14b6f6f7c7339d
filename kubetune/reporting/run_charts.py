"""Charts of the steps of runs: loss, learning rate, speed, memory, the load of the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kubetune.reporting.chart import Chart, Line
from kubetune.reporting.numbers import SKEW
from kubetune.reporting.reading import POINTS, Lines, RunRecord
from kubetune.reporting.series import Series, shorten

Runs = Sequence[RunRecord]
"""The runs of a page. Where there are several, they are laid over each other."""


def points_of(runs: int) -> int:
    """Return how many points each curve has where so many runs are laid over each other."""
    return max(100, POINTS // max(1, runs))


def column(lines: Lines, key: str, points: int, scale: float = 1.0) -> Series | None:
    """Return one key of all lines that have it, or None where none has a value."""
    steps = []
    values = []
    for line in lines:
        if key in line:
            value = line[key]
            steps.append(line["step"])
            values.append(None if value is None else value * scale)
    if all(value is None for value in values):
        return None
    return shorten(steps, values, points)


def labels(runs: Runs) -> list[str]:
    """Return names that tell runs apart: their own, or as much of their paths as is needed."""
    names = [run.name for run in runs]
    for depth in range(1, 8):
        if len(set(names)) == len(names):
            return names
        names = [str(Path(*run.path.absolute().parts[-depth:])) for run in runs]
    if len(set(names)) == len(names):
        return names
    return [f"{name} ({number})" for number, name in enumerate(names, 1)]


def letter(number: int) -> str:
    """Return the letters of a run among several: A, B, …, Z, AA, AB, …"""
    last = chr(ord("A") + number % 26)
    if number < 26:
        return last
    return letter(number // 26 - 1) + last


def line_of(runs: Runs, run: int, name: str, series: Series, metric: int = 0, **look: Any) -> Line:
    """Return a line of one run. Of several runs each has a colour and a letter; metrics differ by dash."""
    if len(runs) == 1:
        return Line(name, series, metric, dash=metric, **look)
    mark = letter(run)
    label = f"{mark} {labels(runs)[run]}: {name}"
    return Line(label, series, run, dash=metric, run=run, mark=mark, **look)


def loss(runs: Runs) -> Chart | None:
    """Return training and evaluation loss, or None where neither is known."""
    is_alone = len(runs) == 1
    lines = []
    for index, run in enumerate(runs):
        raw = run.numbers.curves.get("loss")
        if raw is not None and is_alone:
            lines.append(Line("training loss", raw, kind="raw"))
            lines.append(Line("smoothed", raw, kind="smooth", band=False))
        elif raw is not None:
            lines.append(line_of(runs, index, "training loss", raw, kind="smooth", band=False))
        evaluated = column(run.evaluations, "eval_loss", points_of(len(runs)))
        if evaluated is not None:
            lines.append(line_of(runs, index, "evaluation loss", evaluated, 1, kind="points"))
    if not lines:
        return None
    about = "" if is_alone else "Training loss smoothed."
    return Chart("loss", "Loss", "fixed", lines, about, loss_axis(runs))


_LOSS_PER = {"labelled": "a sample", "pair": "a pair", "graded": "a pair", "judged": "an answer"}
"""What one loss belongs to, by kind of record. Of all other kinds it is a token."""


def loss_axis(runs: Runs) -> str:
    """Return the label of the axis of losses."""
    units = {_LOSS_PER.get(run.config.record_kind, "a token") for run in runs}
    if len(units) == 1:
        return f"loss {units.pop()}"
    return "loss"


def curve_chart(
    runs: Runs, name: str, title: str, unit: str, key: str, about: str = ""
) -> Chart | None:
    """Return the chart of one number of every step, or None where no run has it."""
    lines = []
    for index, run in enumerate(runs):
        series = run.numbers.curves.get(key)
        if series is not None:
            lines.append(line_of(runs, index, title.lower(), series, band=len(runs) == 1))
    return Chart(name, title, unit, lines, about) if lines else None


def gradient_norm(runs: Runs) -> Chart | None:
    """Return the gradient norm, of a lone run with the limit that it is clipped to."""
    chart = curve_chart(runs, "norm", "Gradient norm", "fixed", "grad_norm", "Before clipping.")
    limit = runs[0].config.training.max_grad_norm
    if chart is None or len(runs) > 1 or not limit:
        return chart
    steps = chart.lines[0].series.steps
    ends = Series([steps[0], steps[-1]], [limit, limit])
    rule = Line(f"clipped to {limit:g}", ends, colour=2, kind="rule")
    return replace(chart, lines=[*chart.lines, rule])


def speed(runs: Runs) -> Chart | None:
    """Return tokens per second, of a lone run those with a loss too."""
    is_alone = len(runs) == 1
    lines = []
    shows_trained = False
    for index, run in enumerate(runs):
        speed = run.numbers.curves.get("tokens_per_second")
        if speed is not None:
            lines.append(line_of(runs, index, "tokens/s", speed, band=is_alone))
        trained = run.numbers.curves.get("trained_tokens_per_second")
        is_classifier = run.config.task == "sequence_classification"
        if trained is not None and is_alone and not is_classifier:
            lines.append(line_of(runs, index, "trained tokens/s", trained, 1, band=False))
            shows_trained = True
    if not lines:
        return None
    about = "Tokens of the data, without padding"
    about += "; trained ones are those with a loss." if shows_trained else "."
    return Chart("speed", "Tokens per second", "short", lines, about, "tokens/s")


def skew(runs: Runs) -> Chart | None:
    """Return how unequal the ranks of a lone run were."""
    series = runs[0].numbers.curves.get(SKEW)
    if len(runs) > 1 or series is None:
        return None
    about = (
        "How much shorter the fastest rank computed than the slowest, for which all others wait."
    )
    lines = [Line("skew", series)]
    return Chart("skew", "Skew between ranks", "percent", lines, about, "share of the step")


def machine_charts(runs: Runs) -> list[Chart]:
    """Return the load of a lone run's machine: processors, memory, disk."""
    about = "Of the whole machine of rank 0, other work on it included."
    busy = _machine_lines(runs, "CPU", "cpu_percent", "percent", scale=0.01)
    memory = _machine_lines(runs, "machine", "memory_bytes", "memory_bytes")
    disk = _machine_lines(runs, "read and written", "disk_bytes_per_second")
    title = "CPU and GPU in use" if len(busy) > 1 else "CPU in use"
    charts = [
        Chart("busy", title, "percent", busy, about, "in use"),
        Chart("machine-memory", "Memory of the machine in use", "bytes", memory, about, "in use"),
        Chart("disk", "Disk traffic", "bytes", disk, about, "a second"),
    ]
    return [chart for chart in charts if chart.lines]


def _machine_lines(
    runs: Runs, label: str, key: str, gpu_key: str | None = None, scale: float = 1.0
) -> list[Line]:
    """Return the load of a lone run's machine, with a line for each of its GPUs.

    The load is sampled by time, so several samples may share a step: a line has their mean.
    """
    if len(runs) > 1:
        return []
    samples: dict[str, dict[int, list[float]]] = {}  # by label, then by step
    for sample in runs[0].load:
        values = {label: sample.get(key)}
        if gpu_key is not None:
            for gpu in sample.get("gpus", ()):
                values[f"GPU {gpu['index']}"] = gpu.get(gpu_key)
        for name, value in values.items():
            if isinstance(value, int | float):
                by_step = samples.setdefault(name, {})
                by_step.setdefault(sample["step"], []).append(value * scale)
    lines = []
    for index, (name, by_step) in enumerate(samples.items()):
        means = [sum(values) / len(values) for values in by_step.values()]
        lines.append(Line(name, shorten(list(by_step), means, POINTS), index, dash=index))
    return lines
