"""A run's curves as one still picture, for places that run no script, such as a model's page on the hub.

SVG that reads on light and on dark ground. The interactive charts of a report are charts.py's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from kubetune.reporting.chart import Line, span_of
from kubetune.reporting.reading import metric_keys
from kubetune.reporting.run_charts import column
from kubetune.reporting.series import Series, smooth

POINTS = 300
_WIDTH = 640
_HEIGHT = 220  # of one panel
# Bounds of a panel's lines, in pixels. Around them are the title, the ticks and the legend.
_LEFT = 56
_RIGHT = 624
_TOP = 40
_BOTTOM = 184
_STYLE = """\
text{font:12px sans-serif;fill:#57606a}.grid{stroke:#d0d7de}polyline{fill:none;stroke-width:1.6}
.c0{stroke:#2f6fde;fill:#2f6fde}.c1{stroke:#d1691e;fill:#d1691e}.c2{stroke:#2b8a3e;fill:#2b8a3e}
.c3{stroke:#8250df;fill:#8250df}polyline.c0,polyline.c1,polyline.c2,polyline.c3{fill:none}.faint{opacity:.35}
@media (prefers-color-scheme:dark){text{fill:#9198a1}.grid{stroke:#3d444d}}"""
_COLOURS = 4

Lines = list[dict[str, Any]]


def draw(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the curves of lines of metrics.jsonl as SVG: losses, and below them scores.

    Return None where there is nothing to draw: a single value makes no curve.
    """
    steps = [dict(line) for line in lines if "loss" in line]
    evaluations = [dict(line) for line in lines if "eval_loss" in line]
    panels: list[str] = []
    for title, drawn in (
        ("Loss", _loss_lines(steps, evaluations)),
        ("Evaluation scores", _score_lines(evaluations)),
    ):
        if any(len(_points(line)) > 1 for line in drawn):
            panels.append(_panel(title, drawn, top=len(panels) * _HEIGHT))
    if not panels:
        return None
    height = _HEIGHT * len(panels)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img">\n'
        f"<title>Curves over steps</title>\n<style>{_STYLE}</style>\n"
    )
    return head + "\n".join(panels) + "\n</svg>\n"


def _loss_lines(steps: Lines, evaluations: Lines) -> list[Line]:
    lines = []
    training = column(steps, "loss", POINTS)
    if training is not None:
        width = span_of(training)
        if width > 1:
            lines.append(Line("training loss", training, colour=0, kind="faint"))
            smoothed = Series(training.steps, smooth(training.values, width))
            lines.append(Line("smoothed", smoothed, colour=0))
        else:  # few points need no smoothed line, which would lie on top of them
            lines.append(Line("training loss", training, colour=0))
    evaluation = column(evaluations, "eval_loss", POINTS)
    if evaluation is not None:
        lines.append(Line("evaluation loss", evaluation, colour=1, kind="points"))
    return lines


def _score_lines(evaluations: Lines) -> list[Line]:
    lines: list[Line] = []
    for key in metric_keys(evaluations):
        if key in ("eval_loss", "eval_perplexity"):
            continue
        series = column(evaluations, key, POINTS)
        if series is not None and _is_share(series):
            name = key.removeprefix("eval_").replace("_", " ")
            lines.append(Line(name, series, colour=len(lines), kind="points"))
    return lines[:_COLOURS]


def _is_share(series: Series) -> bool:
    return all(isinstance(value, int | float) and 0 <= value <= 1 for value in series.values)


def _points(line: Line) -> list[tuple[int, float]]:
    points = []
    for step, value in zip(line.series.steps, line.series.values, strict=True):
        if value is not None:
            points.append((step, float(value)))
    return points


@dataclass(frozen=True)
class _Scale:
    """Where steps and values of a panel lie in the picture."""

    steps: tuple[int, int]  # first and last
    values: tuple[float, float]  # lowest and highest
    top: int  # of the panel, in pixels

    @classmethod
    def of(cls, points: Sequence[tuple[int, float]], top: int) -> _Scale:
        """Return the scale on which all points fit."""
        steps = [step for step, _ in points]
        low = min(value for _, value in points)
        high = max(value for _, value in points)
        if high == low:
            low -= (abs(low) or 1.0) / 2
            high += (abs(high) or 1.0) / 2
        return cls((min(steps), max(steps)), (low, high), top)

    def x(self, step: float) -> float:
        """Return the place of a step."""
        first, last = self.steps
        return _LEFT + (step - first) / (last - first) * (_RIGHT - _LEFT)

    def y(self, value: float) -> float:
        """Return the place of a value."""
        low, high = self.values
        return self.top + _BOTTOM - (value - low) / (high - low) * (_BOTTOM - _TOP)


def _panel(title: str, lines: Sequence[Line], top: int) -> str:
    """Return one chart: axes with round numbers, its lines, and a legend."""
    all_points = []
    for line in lines:
        all_points += _points(line)
    scale = _Scale.of(all_points, top)
    heading = f'<text x="{_LEFT}" y="{top + 16}" style="font-weight:bold">{escape(title)}</text>'
    parts = [heading, *_axes(scale)]
    legend_x = _LEFT + 140
    for line in lines:
        parts += _curve(line, scale)
        parts += _legend(line, legend_x, top)
        legend_x += 40 + 7 * len(line.label)
    return "\n".join(parts)


def _axes(scale: _Scale) -> list[str]:
    parts = []
    for tick in round_numbers(*scale.values):
        y = scale.y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    below = scale.top + _BOTTOM
    for tick in round_numbers(*scale.steps, whole=True):
        x = scale.x(tick)
        parts.append(f'<text x="{x:.1f}" y="{below + 16}" text-anchor="middle">{tick:,.0f}</text>')
    parts.append(f'<text x="{_RIGHT}" y="{below + 32}" text-anchor="end">step</text>')
    return parts


def _curve(line: Line, scale: _Scale) -> list[str]:
    look = _look(line)
    points = _points(line)
    parts = []
    if len(points) > 1:
        drawn = " ".join(f"{scale.x(step):.1f},{scale.y(value):.1f}" for step, value in points)
        parts.append(f'<polyline class="{look}" points="{drawn}"/>')
    if line.kind == "points":
        dots = ""
        for step, value in points:
            dots += (
                f'<circle class="{look}" cx="{scale.x(step):.1f}" cy="{scale.y(value):.1f}" r="3"/>'
            )
        parts.append(dots)
    return parts


def _legend(line: Line, x: int, top: int) -> list[str]:
    return [
        f'<rect class="{_look(line)}" x="{x}" y="{top + 9}" width="12" height="4"/>',
        f'<text x="{x + 17}" y="{top + 16}">{escape(line.label)}</text>',
    ]


def _look(line: Line) -> str:
    """Return the classes of a line's colour and strength."""
    return f"c{line.colour} faint" if line.kind == "faint" else f"c{line.colour}"


def round_numbers(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Return three to seven numbers between two that are easy to read, for the ticks of an axis.

    With `whole` they have no fractions, and may be only two.

        0.13 to 0.98    tenths are the size; a distance of 0.5 or 0.2 gives 1 or 4 ticks
        ticks           0.2, 0.4, 0.6, 0.8
    """
    size = 10.0 ** math.floor(math.log10(high - low))
    for factor in (5, 2, 1, 0.5, 0.2):
        step = max(size * factor, 1.0) if whole else size * factor
        first = math.ceil(low / step - 1e-9)
        last = math.floor(high / step + 1e-9)
        if last - first >= 2:
            break
    return [float(f"{number * step:.10g}") for number in range(first, last + 1)]
