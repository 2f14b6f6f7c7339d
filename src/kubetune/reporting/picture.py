"""A run's losses as one still picture, for places that run no script, such as a model's page on the hub.

SVG that reads on light and on dark ground. The interactive charts of a report are of page.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kubetune.base.humanize import number
from kubetune.reporting.run_charts import column
from kubetune.reporting.series import Series

# So few that neighbours' means make a smooth line of a long run.
_POINTS = 100
_WIDTH = 640
_HEIGHT = 220

# Bounds of the lines, in pixels from the upper left corner. Around them are the ticks and the legend.
_LEFT = 56
_RIGHT = 624
_TOP = 40
_BOTTOM = 184

_STYLE = """\
text{font:12px sans-serif;fill:#57606a}.grid{stroke:#d0d7de}polyline{fill:none;stroke-width:1.6}
.c0{stroke:#2f6fde;fill:#2f6fde}.c1{stroke:#d1691e;fill:#d1691e}polyline.c0,polyline.c1{fill:none}
@media (prefers-color-scheme:dark){text{fill:#9198a1}.grid{stroke:#3d444d}}"""

Points = list[tuple[int, float]]  # step and value


def draw(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the losses in lines of metrics.jsonl as SVG.

    Return None where there is nothing to draw: a single value makes no curve.
    """
    rows = [dict(line) for line in lines]
    training = _points(column(rows, "loss", _POINTS))
    evaluation = _points(column(rows, "eval_loss", _POINTS))
    if max(len(training), len(evaluation)) < 2:
        return None

    scale = _Scale.of(training + evaluation)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" role="img">',
        "<title>Curves over steps</title>",
        f"<style>{_STYLE}</style>",
        f'<text x="{_LEFT}" y="16" style="font-weight:bold">Loss</text>',
        *_axes(scale),
    ]

    # The legend is in one row above the curves.
    legend_x = _LEFT + 140
    for look, label, points in (
        ("c0", "training loss", training),
        ("c1", "evaluation loss", evaluation),
    ):
        if points:
            parts.append(_curve(look, points, scale))
            parts.append(f'<rect class="{look}" x="{legend_x}" y="9" width="12" height="4"/>')
            parts.append(f'<text x="{legend_x + 17}" y="16">{label}</text>')
            legend_x += 140

    return "\n".join([*parts, "</svg>", ""])


def _curve(look: str, points: Points, scale: _Scale) -> str:
    """Return the line through the points; a dot for a single one, such as the only evaluation."""
    # A tenth of a pixel is finer than anybody sees.
    places = [(f"{scale.x(step):.1f}", f"{scale.y(value):.1f}") for step, value in points]
    if len(places) == 1:
        x, y = places[0]
        return f'<circle class="{look}" cx="{x}" cy="{y}" r="3"/>'
    drawn = " ".join(f"{x},{y}" for x, y in places)
    return f'<polyline class="{look}" points="{drawn}"/>'


def _points(series: Series | None) -> Points:
    """Return the points that have a value."""
    points = []
    if series is not None:
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
    def of(cls, points: Points) -> _Scale:
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
    """Return a grid line for the lowest, the middle and the highest value, and the first and the last step."""
    parts = []
    low, high = scale.values
    for value in (low, (low + high) / 2, high):
        y = scale.y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')

    for step in scale.steps:
        x = scale.x(step)
        parts.append(
            f'<text x="{x:.1f}" y="{_BOTTOM + 16}" text-anchor="middle">{number(step)}</text>'
        )
    parts.append(f'<text x="{_RIGHT}" y="{_BOTTOM + 32}" text-anchor="end">step</text>')
    return parts
