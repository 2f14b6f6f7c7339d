"""The trials of a sweep as lines over parallel axes, as SVG in the page's own colours.

Each setting has an axis, and so has the metric. A trial is a line through its values:

                learning_rate   r       eval_loss
    top         1e-3            64      2.1
    trial 0     bottom          top     bottom      the best: thick, and named
    trial 1     top             bottom  top
    bottom      1e-5            8       1.4
                                        no result   where the lines of trials without one end

sweep.js names the trial that the pointer is on; it finds the lines by `data-trial`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from kubetune.base.humanize import number
from kubetune.reporting.sweeps.facts import Setting, SweepFacts, TrialFacts
from kubetune.reporting.sweeps.scales import ChoiceScale, NumberScale, Scale, Tick

# Measures of the figure, in pixels.
_WIDTH = 960  # at least
_STRIDE = 150  # from axis to axis, at least
_LEFT = 64  # of the first axis
_RIGHT = 130  # right of the last axis, for its labels and the name of the best trial
_LINE = 15  # of text, from one to the next
_TOP = 66  # of all axes
_BOTTOM = 322
_NOWHERE = 352.0  # where lines without a result end
_HEIGHT = 337.0

_MANY = 60  # trials; with more, lines are thin


@dataclass(frozen=True)
class _Axis:
    """A vertical axis."""

    x: float
    name: str
    about: str  # below the name
    key: str  # shown where the pointer is on the name
    scale: Scale | None  # None for a metric without any result

    def y(self, text: str | None) -> float | None:
        """Return where a value lies, in pixels from the top; None if it has no place."""
        if text is None or self.scale is None:
            return None
        height = self.scale.height(text)
        if height is None:
            return None
        return _BOTTOM - height * (_BOTTOM - _TOP)

    def draw(self, taken: float | None = None) -> str:
        """Return the axis with its name above it and its values next to it; none near `taken`, in pixels."""
        x = f"{self.x:.1f}"
        parts = [
            f'<line x1="{x}" x2="{x}" y1="{_TOP}" y2="{_BOTTOM}"/>',
            f'<text class="name" x="{x}" y="22" text-anchor="middle">{escape(_cut(self.name))}'
            f"<title>{escape(self.key)}</title></text>",
            f'<text x="{x}" y="39" text-anchor="middle">{escape(self.about)}</text>',
        ]
        ticks: list[Tick] = []
        if self.scale is not None:
            ticks = self.scale.ticks()
        # Labels are right of the axis, with a halo (`tick`) so that they are read over lines.
        for tick in ticks:
            y = _BOTTOM - tick.height * (_BOTTOM - _TOP)
            parts.append(
                f'<line x1="{self.x - 4:.1f}" x2="{self.x + 4:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
            if taken is None or abs(y - taken) > _LINE:
                parts.append(_label(self.x, y, tick.label))
        return f'<g class="axis">{"".join(parts)}</g>'


def draw(sweep: SweepFacts) -> Markup:
    """Return the figure of a sweep."""
    axes = _axes(sweep)
    results = axes[-1]
    width = results.x + _RIGHT

    # The line that is drawn last is seen best: the best trial is on top, trials that stopped early below.
    drawn = []
    for trial in reversed(sweep.trials):
        drawn.append(_line(trial, axes, sweep))
    for axis in axes[:-1]:
        drawn.append(axis.draw())
    height = _HEIGHT
    if any(trial.result is None for trial in sweep.trials):
        height = _NOWHERE + _LINE
        drawn.append(_label(results.x, _NOWHERE, "no result"))
    y_of_best = _end(sweep.best, axes)
    drawn.append(results.draw(taken=y_of_best))
    if sweep.best is not None and y_of_best is not None:
        drawn.append(
            f'<circle class="best" cx="{results.x:.1f}" cy="{y_of_best:.1f}" r="5"/>'
            + _label(
                results.x,
                y_of_best,
                f"{number(sweep.best.value)}, trial {sweep.best.number}",
                "tick name",
            )
        )

    look = "parallel"
    if len(sweep.trials) > _MANY:
        look += " many"
    title = f"{sweep.name}: trials over {', '.join(axis.key for axis in axes)}"
    return Markup(
        f'<svg class="{look}" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-labelledby="parallel-title parallel-about"><title id="parallel-title">'
        f'{escape(title)}</title><desc id="parallel-about">{escape(sweep.summary)} The table of '
        f"trials says the same.</desc>{''.join(drawn)}</svg>"
    )


def _label(x: float, y: float, text: str, look: str = "tick") -> str:
    """Return a text right of an axis."""
    return f'<text class="{look}" x="{x + 9:.1f}" y="{y + 4:.1f}">{escape(text)}</text>'


def _axes(sweep: SweepFacts) -> list[_Axis]:
    """Return an axis for each setting, and one for the metric on the right."""
    count = len(sweep.settings)
    # With few settings the axes fill the page, with many the figure is wider and can be scrolled.
    distance = max(_STRIDE, (_WIDTH - _LEFT - _RIGHT) / max(1, count))
    axes = []
    for index, setting in enumerate(sweep.settings):
        about = ""
        if setting.log:
            about = "log scale"
        x = _LEFT + index * distance
        axes.append(_Axis(x, sweep.labels[index], about, setting.key, scale_of(setting)))

    # The metric's axis comes last, so that lines end at the results.
    of_results = scale_of_results(sweep)
    about = "lower is better"
    if sweep.greater:
        about = "higher is better"
    if of_results is not None and of_results.log:
        about += ", log scale"
    axes.append(_Axis(_LEFT + count * distance, sweep.metric, about, sweep.metric, of_results))
    return axes


def scale_of(setting: Setting) -> Scale:
    """Return the scale of a setting's values."""
    if setting.choices:
        return ChoiceScale(setting.choices)
    return NumberScale(setting.low, setting.high, setting.log, setting.whole)


def scale_of_results(sweep: SweepFacts) -> NumberScale | None:
    """Return the scale of the metric; None without any result."""
    return NumberScale.of_results(
        [trial.result for trial in sweep.trials if trial.result is not None]
    )


def colour(height: float, sweep: SweepFacts) -> str:
    """Return the class of a result's colour, from worst to best. `height` on the metric's axis is 0 to 1."""
    share = height
    if not sweep.greater:
        share = 1 - height
    return f"part-{round(100 * share)}"


def _line(trial: TrialFacts, axes: Sequence[_Axis], sweep: SweepFacts) -> str:
    """Return the line of a trial, with a gap if it has no value of a setting."""
    path = ""
    pen = "M"  # begins a line; L continues it
    for axis, text in zip(axes, trial.values, strict=False):
        y = axis.y(text)
        if y is None:
            pen = "M"
            continue
        path += f"{pen}{axis.x:.1f},{y:.1f}"
        pen = "L"
    # A result is never a gap: a line without one ends below the axis, where it can be seen.
    end = _end(trial, axes)
    y_of_end = _NOWHERE
    if end is not None:
        y_of_end = end
    path += f"{pen}{axes[-1].x:.1f},{y_of_end:.1f}"

    # The style sheet has a class for each state, and one for each share of the way from worst to best.
    look = f"trial {trial.state.replace(' ', '-')}"
    if end is not None:
        look += f" {colour((_BOTTOM - end) / (_BOTTOM - _TOP), sweep)}"
    if trial == sweep.best:
        look += " best"
    return f'<path class="{look}" data-trial="{trial.number}" d="{path}"/>'


def _end(trial: TrialFacts | None, axes: Sequence[_Axis]) -> float | None:
    """Return where a trial's result lies, in pixels from the top; None if it has none."""
    if trial is None or trial.result is None:
        return None
    return axes[-1].y(repr(trial.result))


def _cut(text: str) -> str:
    """Return a name that fits between two axes."""
    if len(text) <= 22:
        return text
    return f"{text[:21]}…"
