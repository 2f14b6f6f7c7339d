"""The charts of a page as data: what each shows, its columns, and its numbers as words and a short table.

Drawing is charts.js's; colours are the style sheet's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kubetune.report.numbers import SKEW
from kubetune.report.reading import POINTS, Incident, Lines, RunRecord
from kubetune.report.series import Number, Series, merge, shorten, smooth

_TABLE_ROWS = 10
GIB = 2**30


@dataclass(frozen=True)
class Line:
    """One line of a chart. `colour`: number of a colour; `band`: the lowest and highest behind a mean."""

    label: str
    series: Series
    colour: int
    kind: str = "line"
    band: bool = True


@dataclass(frozen=True)
class Chart:
    """`unit` is how values are written: `fixed`, `short`, `exponent`, `bytes` or `percent`."""

    name: str
    title: str
    unit: str
    lines: Sequence[Line]
    about: str = ""
    markers: Sequence[dict[str, Any]] = field(default_factory=tuple)
    logarithm: bool = False

    def to_json(self) -> dict[str, Any]:
        """What charts.js draws."""
        parts: list[Series] = []
        columns: list[Sequence[Number]] = []
        drawn: list[dict[str, Any]] = []
        bands: list[list[int]] = []
        for line in self.lines:
            series = line.series
            parts.append(series)
            columns.append(series.values)
            drawn.append({"label": line.label, "colour": line.colour, "kind": line.kind})
            if line.band and series.low is not None and series.high is not None:
                at = len(drawn)
                parts += [series, series]
                columns += [series.high, series.low]
                drawn += [{"label": f"{line.label}, highest", "colour": line.colour, "kind": "edge"},
                          {"label": f"{line.label}, lowest", "colour": line.colour, "kind": "edge"}]  # fmt: skip
                bands.append([at + 1, at + 2])
        return {
            "name": self.name,
            "unit": self.unit,
            "lines": drawn,
            "bands": bands,
            "data": merge(parts, columns),
            "markers": list(self.markers),
            "logarithm": self.logarithm,
        }

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """A few rows that say what the lines look like: heading and rows, the first column is the step."""
        shown = [line for line in self.lines if line.kind != "rule"]
        heading = ["step", *(line.label for line in shown)]
        axis = sorted({step for line in shown for step in line.series.steps})
        if len(axis) > _TABLE_ROWS:
            axis = [axis[round(i * (len(axis) - 1) / (_TABLE_ROWS - 1))] for i in range(_TABLE_ROWS)]
        lookups = [dict(zip(line.series.steps, line.series.values, strict=True)) for line in shown]
        return heading, [[step, *(found.get(step) for found in lookups)] for step in axis]


def charts_of(runs: Sequence[RunRecord]) -> list[Chart]:
    """The charts of one run, or the same of several on top of each other."""
    points = points_of(len(runs))
    marks = markers(runs[0].incidents) if len(runs) == 1 else []
    makers: list[Callable[[Sequence[RunRecord], int], Chart | None]] = [
        _loss, _rate, _norm, _speed, _memory, _skew, _scores,
    ]  # fmt: skip
    found = [chart for make in makers if (chart := make(runs, points)) is not None]
    return [Chart(**{**chart.__dict__, "markers": marks}) for chart in found]


def points_of(runs: int) -> int:
    """Points of each curve where so many runs are laid over each other."""
    return max(100, POINTS // runs)


def markers(incidents: Iterable[Incident]) -> list[dict[str, Any]]:
    """Vertical lines at the steps where something happened; what shares a step shares a line."""
    by_step: dict[int, list[Incident]] = {}
    for incident in incidents:
        if incident.step is not None:
            by_step.setdefault(incident.step, []).append(incident)
    return [
        {
            "step": step,
            "text": "; ".join(f"{i.what}: {i.detail}" for i in found),
            "error": any(i.is_error for i in found),
        }
        for step, found in sorted(by_step.items())
    ]


def column(lines: Lines, key: str, points: int, scale: float = 1.0) -> Series | None:
    """One key of all lines that have it; None where none does."""
    having = [(line["step"], line[key]) for line in lines if key in line]
    if not any(value is not None for _, value in having):
        return None
    return shorten(
        [step for step, _ in having], [None if value is None else value * scale for _, value in having], points
    )


def _label(run: RunRecord, what: str, runs: Sequence[RunRecord]) -> str:
    return what if len(runs) == 1 else f"{labels(runs)[runs.index(run)]}: {what}"


def labels(runs: Sequence[RunRecord]) -> list[str]:
    """Names that tell runs apart: their own, or as much of their paths as is needed."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    for depth in range(1, 8):
        names = ["/".join(run.path.absolute().parts[-depth:]) for run in runs]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, 1)]


def _loss(runs: Sequence[RunRecord], points: int) -> Chart | None:
    lines = []
    for number, run in enumerate(runs):
        raw = run.numbers.curves.get("loss")
        if raw is None:
            continue
        span = max(1.0, len(raw.steps) / 80)
        if len(runs) == 1:
            lines.append(Line("training loss", raw, 0, "faint"))
            lines.append(Line("smoothed", Series(raw.steps, smooth(raw.values, span)), 0))
        else:
            lines.append(
                Line(_label(run, "training loss, smoothed", runs), Series(raw.steps, smooth(raw.values, span)), number)
            )
        evaluated = column(run.evaluations, "eval_loss", points)
        if evaluated is not None:
            lines.append(
                Line(_label(run, "evaluation loss", runs), evaluated, 1 if len(runs) == 1 else number, "points")
            )
    return Chart("loss", "Loss", "fixed", lines, logarithm=True) if lines else None


def _of_steps(
    name: str, title: str, unit: str, key: str, *, about: str = "", logarithm: bool = False
) -> Callable[[Sequence[RunRecord], int], Chart | None]:
    def make(runs: Sequence[RunRecord], points: int) -> Chart | None:
        lines = [
            Line(_label(run, title.lower(), runs), found, number if len(runs) > 1 else 0, band=len(runs) == 1)
            for number, run in enumerate(runs)
            if (found := run.numbers.curves.get(key)) is not None
        ]
        return Chart(name, title, unit, lines, about, logarithm=logarithm) if lines else None

    return make


_rate = _of_steps("rate", "Learning rate", "exponent", "learning_rate")
_memory = _of_steps(
    "memory", "Peak memory", "bytes", "peak_memory_bytes",
    about="Highest so far on rank 0: allocated on the GPU, or resident in memory without one.",
)  # fmt: skip


def _norm(runs: Sequence[RunRecord], points: int) -> Chart | None:
    make = _of_steps("norm", "Gradient norm", "fixed", "grad_norm", about="Before clipping.", logarithm=True)
    chart = make(runs, points)
    limit = runs[0].config.training.max_grad_norm
    if chart is None or len(runs) > 1 or not limit:
        return chart
    steps = chart.lines[0].series.steps
    rule = Line(f"clipped to {limit:g}", Series([steps[0], steps[-1]], [limit, limit]), 2, "rule")
    return Chart(**{**chart.__dict__, "lines": [*chart.lines, rule]})


def _speed(runs: Sequence[RunRecord], points: int) -> Chart | None:
    lines = []
    for number, run in enumerate(runs):
        for colour, (key, what) in enumerate(
            [("tokens_per_second", "tokens/s"), ("trained_tokens_per_second", "trained tokens/s")]
        ):
            found = run.numbers.curves.get(key)
            if colour and (len(runs) > 1 or run.config.task == "sequence_classification"):
                continue
            if found is not None:
                band = len(runs) == 1 and not colour
                lines.append(Line(_label(run, what, runs), found, number if len(runs) > 1 else colour, band=band))
    about = "Tokens of the data, without padding"
    about += "; trained ones are those with a loss." if any("trained" in line.label for line in lines) else "."
    return Chart("speed", "Tokens per second", "short", lines, about) if lines else None


def _skew(runs: Sequence[RunRecord], points: int) -> Chart | None:
    if len(runs) > 1:
        return None
    series = runs[0].numbers.curves.get(SKEW)
    if series is None:
        return None
    about = "How much shorter the fastest rank computed than the slowest, for which all others wait."
    return Chart("skew", "Skew between ranks", "percent", [Line("skew", series, 0)], about)


def _scores(runs: Sequence[RunRecord], points: int) -> Chart | None:
    """Metrics between 0 and 1, such as accuracy, where there are enough evaluations for a line."""
    lines: list[Line] = []
    for number, run in enumerate(runs):
        keys = dict.fromkeys(key for line in run.evaluations for key in line if key.startswith("eval_"))
        for key in keys:
            values = [line.get(key) for line in run.evaluations]
            if len(values) > 2 and all(isinstance(value, (int, float)) and 0 <= value <= 1 for value in values):
                if key in ("eval_loss", "eval_perplexity"):
                    continue
                series = column(run.evaluations, key, points)
                assert series is not None
                what = key.removeprefix("eval_").replace("_", " ")
                lines.append(Line(_label(run, what, runs), series, number if len(runs) > 1 else len(lines), "points"))
    # A single line has no legend to name it.
    about = f"{lines[0].label[:1].upper()}{lines[0].label[1:]}." if len(lines) == 1 else ""
    return Chart("scores", "Evaluation scores", "percent", lines[:8], about) if lines else None
