"""A run's losses, or its rewards, as one still picture, for places that run no script, such as a model's page on the hub.

SVG that reads on light and on dark ground. The interactive charts of a report are of page.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from kubetune.base.humanize import number
from kubetune.reporting.reading import Lines
from kubetune.reporting.run_charts import column

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


def draw(lines: Lines) -> str | None:
    """Return the losses in lines of metrics.jsonl as SVG; of a run by reward its rewards, as its loss says nothing.

    Return None if there is nothing to draw: a single value makes no curve.
    """
    key = "reward" if any("reward" in line for line in lines) else "loss"
    training = _points(lines, key)
    evaluation = _points(lines, f"eval_{key}")
    if max(len(training), len(evaluation)) < 2:
        return None

    steps = [step for step, _ in training + evaluation]
    values = [value for _, value in training + evaluation]
    low = min(values)
    high = max(values)
    low, high = _apart(low, high)
    across = _Scale(min(steps), max(steps), _LEFT, _RIGHT)
    up = _Scale(low, high, _BOTTOM, _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" role="img">',
        "<title>Curves over steps</title>",
        f"<style>{_STYLE}</style>",
        f'<text x="{_LEFT}" y="16" style="font-weight:bold">{key.capitalize()}</text>',
        *_axes(across, up),
    ]

    # The legend is in one row above the curves.
    legend_x = _LEFT + 140
    for look, label, points in (
        ("c0", f"training {key}", training),
        ("c1", f"held-out {key}", evaluation),
    ):
        if points:
            # A tenth of a pixel is finer than anybody sees.
            places = [f"{across.pixel(step):.1f},{up.pixel(value):.1f}" for step, value in points]
            shape = f'polyline points="{" ".join(places)}"'
            if len(places) == 1:
                # A dot, such as for the only evaluation.
                x, y = places[0].split(",")
                shape = f'circle cx="{x}" cy="{y}" r="3"'
            parts.append(f'<{shape} class="{look}"/>')
            parts.append(f'<rect class="{look}" x="{legend_x}" y="9" width="12" height="4"/>')
            parts.append(f'<text x="{legend_x + 17}" y="16">{label}</text>')
            legend_x += 140

    return "\n".join([*parts, "</svg>", ""])


def _apart(low: float, high: float) -> tuple[float, float]:
    """Return the bounds of the values; a flat line goes through the middle."""
    if high > low:
        return low, high
    half = (abs(low) or 1.0) / 2
    return low - half, high + half


def _points(lines: Lines, key: str) -> Points:
    """Return the points of a key that have a value."""
    series = column(lines, key, _POINTS)
    if series is None:
        return []
    pairs = zip(series.steps, series.values, strict=True)
    return [(step, value) for step, value in pairs if value is not None]


@dataclass(frozen=True)
class _Scale:
    """The places of values in the picture."""

    low: float  # the lowest value
    high: float
    begin: int  # the pixel of the lowest
    end: int

    def pixel(self, value: float) -> float:
        """Return the place of a value."""
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)


def _axes(across: _Scale, up: _Scale) -> list[str]:
    """Return a grid line for the lowest, the middle and the highest value, and the first and the last step."""
    parts = []
    for value in (up.low, (up.low + up.high) / 2, up.high):
        y = up.pixel(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for step in (across.low, across.high):
        x = across.pixel(step)
        text = f'x="{x:.1f}" y="{_BOTTOM + 16}" text-anchor="middle"'
        parts.append(f"<text {text}>{number(step)}</text>")
    parts.append(f'<text x="{_RIGHT}" y="{_BOTTOM + 32}" text-anchor="end">step</text>')
    return parts
