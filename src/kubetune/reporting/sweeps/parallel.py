"""The trials of a sweep as lines over parallel axes, as SVG in the page's own colours.

Each setting has an axis, and so has the metric. A trial is a line through its values:

                learning_rate   r       eval_loss
    top         1e-3            64      2.1
    trial 0     bottom          top     bottom      the best: thick, and named
    trial 1     top             bottom  top
    bottom      1e-5            8       1.4
                                        no result   where the lines of trials without one end

A phone shows a second figure, whose axes lie below each other, so that all of them fit. Their names stand left of
them, where no line passes.
sweep.js names the trial that the pointer is on; it finds the lines by `data-trial`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from kubetune.base.humanize import number
from kubetune.reporting.look.metric_values import label_of
from kubetune.reporting.sweeps.facts import Setting, SweepFacts, TrialFacts
from kubetune.reporting.sweeps.scales import ChoiceScale, NumberScale, Scale

_MANY = 60  # trials; with more, lines are thin
_LINE = 15  # pixels from one line of text to the next
_BESIDE = 14  # characters of a name left of its axis


@dataclass(frozen=True)
class _Frame:
    """Where the axes lie, in pixels: `across` goes from axis to axis, `along` from an axis' low end to its high one."""

    look: str
    is_tall: bool  # axes are horizontal, one below the other
    first: float  # across: where the first axis lies
    stride: float  # across: from axis to axis
    last: float  # across: from the last axis to the end of the figure, for its labels
    low: float  # along
    high: float  # along
    nowhere: float  # along: where lines without a result end
    size: float  # along: of the whole figure

    def across(self, index: int) -> float:
        """Return where an axis lies."""
        return self.first + index * self.stride

    def along(self, height: float) -> float:
        """Return where a value lies on its axis; `height` is 0 to 1."""
        return self.low + height * (self.high - self.low)

    def point(self, across: float, along: float) -> tuple[float, float]:
        """Return x and y."""
        return (along, across) if self.is_tall else (across, along)

    def label(self, across: float, along: float, text: str, look: str = "tick") -> str:
        """Return a text beside an axis: right of it, or below it."""
        x, y = self.point(across, along)
        anchor = ""
        if self.is_tall:
            y += _LINE
            # Those at the ends of an axis stay within the figure.
            is_at_high = along > self.high - 40
            anchor = ' text-anchor="end"' if is_at_high else ' text-anchor="middle"'
            if along < self.low + 40:
                anchor = ""
        else:
            x += 9
            y += 4
        return f'<text class="{look}" x="{x:.1f}" y="{y:.1f}"{anchor}>{escape(text)}</text>'


def _frames(settings: int) -> list[_Frame]:
    """Return the frame of a wide window and that of a phone, of so many settings and the metric."""
    # With few settings the axes fill the page.
    stride = max(150, (960 - 64 - 130) / max(1, settings))
    wide = _Frame("wide", False, 64, stride, 130, low=322, high=66, nowhere=352, size=337)
    tall = _Frame("tall", True, 12, 80, 42, low=114, high=336, nowhere=102, size=348)
    return [wide, tall]


@dataclass(frozen=True)
class _Axis:
    """An axis."""

    across: float
    name: str
    about: str  # beside the name
    key: str  # shown where the pointer is on the name
    scale: Scale | None  # None for a metric without any result

    def along(self, frame: _Frame, text: str | None) -> float | None:
        """Return where a value lies; None if it has no place."""
        if text is None or self.scale is None:
            return None
        height = self.scale.height(text)
        return None if height is None else frame.along(height)

    def draw(self, frame: _Frame, taken: float | None = None) -> str:
        """Return the axis with its name and its values; none of these near `taken`."""
        parts = [_stroke(frame, (self.across, frame.low), (self.across, frame.high))]
        title = f"<title>{escape(self.key)}</title>"
        if frame.is_tall:
            y = self.across + 4
            for look, text in self._beside():
                parts.append(f'<text class="{look}" x="0" y="{y:.1f}">{escape(text)}{title}</text>')
                y += _LINE
        else:
            x = f"{self.across:.1f}"
            parts.append(
                f'<text class="name" x="{x}" y="22" text-anchor="middle">{escape(_cut(self.name))}{title}</text>'
                f'<text x="{x}" y="39" text-anchor="middle">{escape(self.about)}</text>'
            )
        # Labels have a halo (`tick`), so that they are read over lines.
        free = 48 if frame.is_tall else _LINE
        for tick in self.scale.ticks() if self.scale else ():
            along = frame.along(tick.height)
            parts.append(_stroke(frame, (self.across - 4, along), (self.across + 4, along)))
            if taken is None or abs(along - taken) > free:
                parts.append(frame.label(self.across, along, tick.label))
        return f'<g class="axis">{"".join(parts)}</g>'

    def _beside(self) -> list[tuple[str, str]]:
        """Return the lines of text left of a horizontal axis, each with its look: the name, and what is said of it."""
        lines = [("name", line) for line in _folded(self.name)]
        lines += [("about", line) for line in self.about.split(", ") if line]
        return lines


def _stroke(frame: _Frame, one: tuple[float, float], other: tuple[float, float]) -> str:
    """Return a straight line between two points, across and along."""
    (x1, y1), (x2, y2) = frame.point(*one), frame.point(*other)
    return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def draw(sweep: SweepFacts) -> list[Markup]:
    """Return the figures of a sweep: for a wide window, and for a phone."""
    return [_figure(sweep, frame) for frame in _frames(len(sweep.settings))]


def _figure(sweep: SweepFacts, frame: _Frame) -> Markup:
    axes = _axes(sweep, frame)
    results = axes[-1]

    # The line that is drawn last is seen best: the best trial is on top, trials that stopped early below.
    drawn = [_line(trial, axes, sweep, frame) for trial in reversed(sweep.trials)]
    drawn += [axis.draw(frame) for axis in axes[:-1]]
    size = frame.size
    if any(trial.result is None for trial in sweep.trials):
        size = max(size, frame.nowhere + _LINE)
        # Below the ticks of a horizontal axis.
        across = results.across
        if frame.is_tall:
            across += _LINE
        drawn.append(frame.label(across, frame.nowhere, "no result"))
    best = _end(sweep.best, results, frame)
    drawn.append(results.draw(frame, taken=best))
    if sweep.best is not None and best is not None:
        x, y = frame.point(results.across, best)
        named = f"{number(sweep.best.value)}, trial {sweep.best.number}"
        drawn.append(f'<circle class="best" cx="{x:.1f}" cy="{y:.1f}" r="5"/>')
        drawn.append(frame.label(results.across, best, named, "tick name"))

    look = f"parallel {frame.look}"
    if len(sweep.trials) > _MANY:
        look += " many"
    width, height = frame.point(results.across + frame.last, size)
    title = f"{sweep.name}: trials over {', '.join(axis.key for axis in axes)}"
    return Markup(
        f'<svg class="{look}" viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(title)}. '
        f'{escape(sweep.summary)} The table of trials says the same.">{"".join(drawn)}</svg>'
    )


def _axes(sweep: SweepFacts, frame: _Frame) -> list[_Axis]:
    """Return an axis for each setting, and one for the metric at the end."""
    axes = []
    for index, setting in enumerate(sweep.settings):
        about = ""
        if setting.log:
            about = "log scale"
        across = frame.across(index)
        axes.append(_Axis(across, sweep.labels[index], about, setting.key, scale_of(setting)))

    # The metric's axis comes last, so that lines end at the results.
    of_results = scale_of_results(sweep)
    about = "lower is better"
    if sweep.greater:
        about = "higher is better"
    if of_results is not None and of_results.log:
        about += ", log scale"
    across = frame.across(len(sweep.settings))
    axes.append(_Axis(across, label_of(sweep.metric), about, sweep.metric, of_results))
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


def _line(trial: TrialFacts, axes: Sequence[_Axis], sweep: SweepFacts, frame: _Frame) -> str:
    """Return the line of a trial, with a gap if it has no value of a setting."""
    path = ""
    pen = "M"  # begins a line; L continues it
    for axis, text in zip(axes, trial.values, strict=False):
        along = axis.along(frame, text)
        if along is None:
            pen = "M"
            continue
        x, y = frame.point(axis.across, along)
        path += f"{pen}{x:.1f},{y:.1f}"
        pen = "L"
    # A result is never a gap: a line without one ends beyond the axis, where it can be seen.
    end = _end(trial, axes[-1], frame)
    x, y = frame.point(axes[-1].across, frame.nowhere if end is None else end)
    path += f"{pen}{x:.1f},{y:.1f}"

    # The style sheet has a class for each state, and one for each share of the way from worst to best.
    look = f"trial {trial.state.replace(' ', '-')}"
    if end is not None:
        look += f" {colour((end - frame.low) / (frame.high - frame.low), sweep)}"
    if trial == sweep.best:
        look += " best"
    return f'<path class="{look}" data-trial="{trial.number}" d="{path}"/>'


def _end(trial: TrialFacts | None, results: _Axis, frame: _Frame) -> float | None:
    """Return where a trial's result lies on the axis of results; None if it has none."""
    if trial is None or trial.result is None:
        return None
    return results.along(frame, repr(trial.result))


def _cut(text: str, most: int = 22) -> str:
    """Return a name that fits between two axes, or beside one."""
    if len(text) <= most:
        return text
    return f"{text[: most - 1]}…"


def _folded(name: str) -> list[str]:
    """Return a name in lines that fit beside an axis: gradient_ / accumulation_ / steps."""
    lines = [""]
    for part in re.findall(r"[^_. ]*[_. ]?", name):
        if lines[-1] and len(lines[-1]) + len(part) > _BESIDE:
            lines.append("")
        lines[-1] += part
    return [_cut(line.rstrip(), _BESIDE) for line in lines]
