"""A run's curves as one still picture, for places that run no script, such as a model's page on the hub.

SVG that reads on light and on dark ground. The interactive charts of a report are charts.py's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from kubetune.reporting.charts import Line, column
from kubetune.reporting.series import Series, smooth

POINTS = 300
_WIDTH, _HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 624, 40, 184
"""Bounds of a panel's lines; around them are its words."""
_STYLE = """\
text{font:12px sans-serif;fill:#57606a}.grid{stroke:#d0d7de}polyline{fill:none;stroke-width:1.6}
.c0{stroke:#2f6fde;fill:#2f6fde}.c1{stroke:#d1691e;fill:#d1691e}.c2{stroke:#2b8a3e;fill:#2b8a3e}
.c3{stroke:#8250df;fill:#8250df}polyline.c0,polyline.c1,polyline.c2,polyline.c3{fill:none}.faint{opacity:.35}
@media (prefers-color-scheme:dark){text{fill:#9198a1}.grid{stroke:#3d444d}}"""
_COLOURS = 4


def draw(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """The curves of lines of metrics.jsonl as SVG: losses, and below them scores; None where there is nothing to draw.

    A single value makes no curve.
    """
    panels = [
        _panel(title, found, number * _HEIGHT)
        for number, (title, found) in enumerate((title, found) for title, found in _titled(lines) if found)
    ]
    if not panels:
        return None
    height = _HEIGHT * len(panels)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img">\n<title>Curves over steps</title>\n<style>{_STYLE}</style>\n' + "\n".join(panels) + "\n</svg>\n"
    )


def _titled(lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Line]]]:
    steps = [dict(line) for line in lines if "loss" in line]
    evaluations = [dict(line) for line in lines if "eval_loss" in line]
    losses: list[Line] = []
    if (raw := column(steps, "loss", POINTS)) is not None:
        width = len(raw.steps) / 80
        losses.append(Line("training loss", raw, 0, "faint" if width > 1 else "line"))
        if width > 1:  # few points need none, and would lie under it
            losses.append(Line("smoothed", Series(raw.steps, smooth(raw.values, width)), 0))
    if (evaluated := column(evaluations, "eval_loss", POINTS)) is not None:
        losses.append(Line("evaluation loss", evaluated, 1, "points"))
    scores: list[Line] = []
    for key in dict.fromkeys(key for line in evaluations for key in line if key.startswith("eval_")):
        found = column(evaluations, key, POINTS)
        if key not in ("eval_loss", "eval_perplexity") and found is not None and _is_score(found):
            scores.append(Line(key.removeprefix("eval_").replace("_", " "), found, len(scores) % _COLOURS, "points"))
    return [("Loss", _curved(losses)), ("Evaluation scores", _curved(scores[:_COLOURS]))]


def _curved(lines: Sequence[Line]) -> list[Line]:
    """The lines, where at least one of them has two points."""
    return list(lines) if any(len(_points(line)) > 1 for line in lines) else []


def _is_score(series: Series) -> bool:
    return all(isinstance(value, int | float) and 0 <= value <= 1 for value in series.values)


def _points(line: Line) -> list[tuple[int, float]]:
    return [(s, float(v)) for s, v in zip(line.series.steps, line.series.values, strict=True) if v is not None]


def _panel(title: str, lines: Sequence[Line], top: int) -> str:
    """One chart: axes with round numbers, its lines, and what each of them is."""
    points = [_points(line) for line in lines]
    steps = [step for found in points for step, _ in found]
    values = [value for found in points for _, value in found]
    low, high = min(values), max(values)
    if high == low:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2

    def across(step: float) -> float:
        return _LEFT + (step - min(steps)) / (max(steps) - min(steps)) * (_RIGHT - _LEFT)

    def down(value: float) -> float:
        return top + _BOTTOM - (value - low) / (high - low) * (_BOTTOM - _TOP)

    parts = [f'<text x="{_LEFT}" y="{top + 16}" style="font-weight:bold">{escape(title)}</text>']
    for tick in round_numbers(low, high):
        y = down(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    parts += [
        f'<text x="{across(tick):.1f}" y="{top + _BOTTOM + 16}" text-anchor="middle">{tick:,.0f}</text>'
        for tick in round_numbers(min(steps), max(steps), whole=True)
    ]
    parts.append(f'<text x="{_RIGHT}" y="{top + _BOTTOM + 32}" text-anchor="end">step</text>')
    at = _LEFT + 140
    for line, found in zip(lines, points, strict=True):
        drawn = " ".join(f"{across(step):.1f},{down(value):.1f}" for step, value in found)
        look = f"c{line.colour}" + (" faint" if line.kind == "faint" else "")
        if len(found) > 1:
            parts.append(f'<polyline class="{look}" points="{drawn}"/>')
        if line.kind == "points":
            dots = (f'<circle class="{look}" cx="{across(s):.1f}" cy="{down(v):.1f}" r="3"/>' for s, v in found)
            parts.append("".join(dots))
        parts.append(f'<rect class="{look}" x="{at}" y="{top + 9}" width="12" height="4"/>')
        parts.append(f'<text x="{at + 17}" y="{top + 16}">{escape(line.label)}</text>')
        at += 40 + 7 * len(line.label)
    return "\n".join(parts)


def round_numbers(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Three to seven numbers between two that are easy to read; `whole`: no fractions, and then perhaps only two."""
    size = 10.0 ** math.floor(math.log10(high - low))
    for factor in (5, 2, 1, 0.5, 0.2):
        step = max(size * factor, 1.0) if whole else size * factor
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first >= 2:
            break
    return [float(f"{number * step:.10g}") for number in range(first, last + 1)]
