"""The trials of a sweep as dots, a setting against the metric, as SVG in the page's own colours.

        eval_loss
    2.1     o
                o
    1.4             O           the best: larger
         1e-5     1e-3
          learning_rate

sweep.js names the trial that the pointer is on; it finds the dots by `data-trial`, as it finds lines.
"""

from __future__ import annotations

from html import escape

from markupsafe import Markup

from kubetune.reporting.look.metric_values import label_of
from kubetune.reporting.sweeps.facts import Setting, SweepFacts
from kubetune.reporting.sweeps.parallel import colour, scale_of, scale_of_results
from kubetune.reporting.sweeps.scales import NumberScale

# Bounds of the dots, in pixels from the upper left corner. Around them are ticks and names.
_LEFT = 58
_RIGHT = 330
_TOP = 30
_BOTTOM = 190
_WIDTH = 350
_HEIGHT = 230
_APART = 34  # pixels between the labels below the dots, at least


def draw(sweep: SweepFacts) -> list[Markup]:
    """Return a figure for each setting; none without two results, which have nothing to show."""
    of_results = scale_of_results(sweep)
    if of_results is None or of_results.high <= of_results.low:
        return []
    figures = []
    for index, setting in enumerate(sweep.settings):
        figures.append(_figure(sweep, index, setting, of_results))
    return figures


def _figure(sweep: SweepFacts, index: int, setting: Setting, of_results: NumberScale) -> Markup:
    """Return the dots of a setting. What has no result or no value is in the table alone."""
    scale = scale_of(setting)
    parts = [_ticks_of_results(of_results)]
    free_from = 0.0
    for tick in scale.ticks():
        x = _x(tick.height)
        if x < free_from:
            continue
        free_from = x + max(_APART, 7 * len(tick.label))
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_BOTTOM}"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{_BOTTOM + 18}" text-anchor="middle">{escape(tick.label)}</text>'
        )
    # The best is drawn last, over all others.
    for trial in reversed(sweep.trials):
        text = trial.values[index]
        if trial.result is None or text is None:
            continue
        across = scale.height(text)
        up = of_results.height(repr(trial.result))
        if across is None or up is None:
            continue
        look = f"trial {trial.state.replace(' ', '-')} {colour(up, sweep)}"
        radius = 4
        if trial == sweep.best:
            look += " best"
            radius = 7
        parts.append(
            f'<circle class="{look}" data-trial="{trial.number}" cx="{_x(across):.1f}" '
            f'cy="{_y(up):.1f}" r="{radius}"/>'
        )
    middle = (_LEFT + _RIGHT) / 2
    parts.append(
        f'<text class="name" x="{middle}" y="{_HEIGHT - 4}" text-anchor="middle">{escape(setting.key)}</text>'
        f'<text class="name" x="0" y="14">{escape(label_of(sweep.metric))}</text>'
    )
    title = f"{label_of(sweep.metric)} by {setting.key}; the table of trials says the same"
    return Markup(
        f'<svg class="scatter" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


def _ticks_of_results(scale: NumberScale) -> str:
    """Return the lines and numbers of the metric, left of the dots."""
    parts = []
    for tick in scale.ticks():
        y = _y(tick.height)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(tick.label)}</text>'
        )
    return "".join(parts)


def _x(height: float) -> float:
    return _LEFT + height * (_RIGHT - _LEFT)


def _y(height: float) -> float:
    return _BOTTOM - height * (_BOTTOM - _TOP)
