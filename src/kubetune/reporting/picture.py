"""A run's losses as one still picture, for places that run no script, such as a model's page on the hub.

SVG that reads on light and on dark ground. The interactive charts of a report are of page.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from kubetune.reporting.chart import span_of
from kubetune.reporting.run_charts import column
from kubetune.reporting.series import Series, smooth

_POINTS = 300
_WIDTH = 640
_HEIGHT = 220

# Bounds of the lines, in pixels from the upper left corner. Around them are the ticks and the legend.
_LEFT = 56
_RIGHT = 624
_TOP = 40
_BOTTOM = 184

_STYLE = """\
text{font:12px sans-serif;fill:#57606a}.grid{stroke:#d0d7de}polyline{fill:none;stroke-width:1.6}
.c0{stroke:#2f6fde;fill:#2f6fde}.c1{stroke:#d1691e;fill:#d1691e}polyline.c0,polyline.c1{fill:none}.faint{opacity:.35}
@media (prefers-color-scheme:dark){text{fill:#9198a1}.grid{stroke:#3d444d}}"""


@dataclass(frozen=True)
class _Curve:
    """A line of the picture."""

    label: str
    look: str  # classes of the style sheet: colour and strength
    points: list[tuple[int, float]]  # step and value
    has_dots: bool = False


def draw(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the losses in lines of metrics.jsonl as SVG.

    Return None where there is nothing to draw: a single value makes no curve.
    """
    curves = _curves([dict(line) for line in lines])
    if not any(len(curve.points) > 1 for curve in curves):
        return None
    all_points = []
    for curve in curves:
        all_points += curve.points

    scale = _Scale.of(all_points)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" role="img">',
        "<title>Curves over steps</title>",
        f"<style>{_STYLE}</style>",
        f'<text x="{_LEFT}" y="16" style="font-weight:bold">Loss</text>',
        *_axes(scale),
    ]

    # The legend stands in one row above the curves.
    legend_x = _LEFT + 140
    for curve in curves:
        parts += _drawn(curve, scale)
        parts.append(f'<rect class="{curve.look}" x="{legend_x}" y="9" width="12" height="4"/>')
        parts.append(f'<text x="{legend_x + 17}" y="16">{escape(curve.label)}</text>')
        # About 7 pixels a letter, and room for the sample of the next line.
        legend_x += 40 + 7 * len(curve.label)

    return "\n".join([*parts, "</svg>", ""])


def _curves(lines: list[dict[str, Any]]) -> list[_Curve]:
    """Return the training loss, faint behind its smoothed line, and the evaluation loss."""
    curves = []
    training = column(lines, "loss", _POINTS)
    if training is not None:
        width = span_of(training)
        look = "c0"
        # Of few points, the smoothed line would lie on top of them.
        if width > 1:
            look = "c0 faint"
            smoothed = Series(training.steps, smooth(training.values, width))
            curves.append(_Curve("smoothed", "c0", _points(smoothed)))
        curves.insert(0, _Curve("training loss", look, _points(training)))

    evaluation = column(lines, "eval_loss", _POINTS)
    if evaluation is not None:
        curves.append(_Curve("evaluation loss", "c1", _points(evaluation), has_dots=True))
    return curves


def _points(series: Series) -> list[tuple[int, float]]:
    points = []
    for step, value in zip(series.steps, series.values, strict=True):
        if value is not None:
            points.append((step, float(value)))
    return points


@dataclass(frozen=True)
class _Scale:
    """Where steps and values lie in the picture."""

    steps: tuple[int, int]  # first and last
    values: tuple[float, float]  # lowest and highest

    @classmethod
    def of(cls, points: Sequence[tuple[int, float]]) -> _Scale:
        """Return the scale on which all points fit."""
        steps = [step for step, _ in points]
        low = min(value for _, value in points)
        high = max(value for _, value in points)
        if high == low:
            # A flat line goes through the middle.
            low -= (abs(low) or 1.0) / 2
            high += (abs(high) or 1.0) / 2
        return cls((min(steps), max(steps)), (low, high))

    def x(self, step: float) -> float:
        """Return where a step lies, in pixels from the left."""
        first, last = self.steps
        return _LEFT + (step - first) / (last - first) * (_RIGHT - _LEFT)

    def y(self, value: float) -> float:
        """Return where a value lies, in pixels from the top."""
        low, high = self.values
        return _BOTTOM - (value - low) / (high - low) * (_BOTTOM - _TOP)


def _axes(scale: _Scale) -> list[str]:
    """Return a grid line for each round value, and below it a number for each round step."""
    parts = []
    for tick in round_numbers(*scale.values):
        y = scale.y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')

    for tick in round_numbers(*scale.steps, whole=True):
        x = scale.x(tick)
        parts.append(
            f'<text x="{x:.1f}" y="{_BOTTOM + 16}" text-anchor="middle">{tick:,.0f}</text>'
        )

    parts.append(f'<text x="{_RIGHT}" y="{_BOTTOM + 32}" text-anchor="end">step</text>')
    return parts


def _drawn(curve: _Curve, scale: _Scale) -> list[str]:
    """Return a curve as SVG: a line where it has several points, and its dots."""
    # A tenth of a pixel is finer than anybody sees.
    places = [(scale.x(step), scale.y(value)) for step, value in curve.points]
    parts = []
    if len(places) > 1:
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="{curve.look}" points="{drawn}"/>')
    if curve.has_dots:
        for x, y in places:
            parts.append(f'<circle class="{curve.look}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>')
    return parts


def round_numbers(
    low: float,
    high: float,
    *,
    whole: bool = False,
) -> list[float]:
    """Return three to seven numbers between two that are easy to read, for the ticks of an axis.

    With `whole` they have no fractions, and may be only two.

        0.13 to 0.98    tenths are the size; a distance of 0.5 or 0.2 gives 1 or 4 ticks
        ticks           0.2, 0.4, 0.6, 0.8
    """
    # From the widest distance to the narrowest: the first with enough ticks is taken.
    size = 10.0 ** math.floor(math.log10(high - low))
    for factor in (5, 2, 1, 0.5, 0.2):
        distance = size * factor
        if whole:
            distance = max(distance, 1.0)
        # The smallest and the largest multiple of the distance that lie on the axis.
        first = math.ceil(low / distance - 1e-9)
        last = math.floor(high / distance + 1e-9)
        if last - first >= 2:
            break

    # Rounded, since 3 * 0.1 is 0.30000000000000004.
    return [float(f"{number * distance:.10g}") for number in range(first, last + 1)]
