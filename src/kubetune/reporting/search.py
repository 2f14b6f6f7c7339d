"""The part of a page that is on a search: its trials over parallel axes, and each setting's importance.

Plain SVG in the page's own colours. Not for choosing trials, nor for reading a sweep's folder
(library/sweep/page).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from kubetune.base.humanize import number

# Of the figure, in pixels.
_WIDTH = 960
_HEIGHT = 340
_MARGIN = 70  # left of the first axis, and right of the last
_TOP = 46  # of all axes
_BOTTOM = 300

# Texts beside an axis. More would lie on top of each other.
_CHOICES_SHOWN = 12


@dataclass(frozen=True)
class Setting:
    """A setting that was searched."""

    name: str
    log: bool = False  # on a logarithmic scale
    importance: float | None = None  # a share; None if unknown


@dataclass(frozen=True)
class Attempt:
    """A trial."""

    label: str
    state: str  # how it ended
    values: tuple[str, ...]  # of each setting, as text
    value: float | None  # of the metric
    spread: float | None
    steps: str
    why: str


@dataclass(frozen=True)
class SearchFacts:
    """A search as the page shows it."""

    name: str
    metric: str
    settings: tuple[Setting, ...]
    attempts: tuple[Attempt, ...]  # the best first
    lines: tuple[str, ...]  # sentences on the result

    @property
    def importances(self) -> list[tuple[str, float]]:
        """Settings with their importance, the largest first."""
        pairs = []
        for setting in self.settings:
            if setting.importance is not None:
                pairs.append((setting.name, setting.importance))
        return sorted(pairs, key=lambda pair: -pair[1])

    @property
    def figure(self) -> Markup:
        """The trials as lines over parallel axes, as SVG.

        Each setting has an axis, and so has the metric. A trial is a line through its values:

                        learning_rate   r       eval_loss
            top         1e-3            64      2.1
            trial 0     bottom          top     bottom      green: the best
            trial 1     top             bottom  top
            bottom      1e-5            8       1.4
        """
        # An axis for each setting, and one for the metric on the right.
        distance = (_WIDTH - 2 * _MARGIN) / max(1, len(self.settings))
        axes = []
        for index, setting in enumerate(self.settings):
            texts = [attempt.values[index] for attempt in self.attempts]
            name = setting.name.rpartition(".")[2]
            axes.append(_Axis.over(texts, name, _MARGIN + index * distance, log=setting.log))

        values = [_text(attempt.value) for attempt in self.attempts]
        # The metric's axis stands last, so that lines end at the results.
        x = _MARGIN + len(axes) * distance
        axes.append(_Axis.over(values, self.metric, x, log=False))

        # What is drawn last is seen best: the best trial is on top, trials that were given up below.
        drawn = []
        for index in reversed(range(len(self.attempts))):
            drawn.append(self._line(index, axes))
        names = []
        for axis in axes:
            drawn.append(axis.draw())
            names.append(axis.name)
        about = (
            f"{len(self.attempts)} trials over {', '.join(names)}; the table below says the same"
        )
        return Markup(
            f'<svg class="parallel" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
            f'aria-label="{escape(about)}">{"".join(drawn)}</svg>'
        )

    def _line(self, index: int, axes: Sequence[_Axis]) -> str:
        """Return the line of a trial. One without a value of the metric ends before the last axis."""
        attempt = self.attempts[index]
        # An empty text is a setting that this trial did not have.
        points = []
        for axis, text in zip(axes, (*attempt.values, _text(attempt.value)), strict=True):
            if text:
                points.append(f"{axis.x:.1f},{axis.y(text):.1f}")
        # The style sheet has a class for each state.
        look = attempt.state.replace(" ", "-")
        if index == 0 and attempt.state == "done":
            look = "best"
        # Shown where the pointer is on the line.
        title = f"trial {attempt.label}: {self.metric} {number(attempt.value)}, {attempt.state}"
        return (
            f'<polyline class="{escape(look)}" points="{" ".join(points)}">'
            f"<title>{escape(title)}</title></polyline>"
        )


def _text(value: float | None) -> str:
    """Return a value such that `float` reads it again, and "" for none."""
    if value is None:
        return ""
    return repr(value)


@dataclass(frozen=True)
class _Axis:
    """A vertical axis: numbers from `low` to `high`, or texts one above the other."""

    name: str
    x: float
    texts: tuple[str, ...] = ()  # from the bottom; empty for numbers
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    @classmethod
    def over(
        cls,
        values: Iterable[str],
        name: str,
        x: float,
        *,
        log: bool,
    ) -> _Axis:
        """Return the axis on which all values have a place. Empty values are left out."""
        texts = sorted({value for value in values if value})
        numbers = [value for value in map(_number, texts) if value is not None]
        # One text among numbers makes all of them texts.
        if len(numbers) < len(texts) or not texts:
            return cls(name, x, tuple(texts))
        # A logarithm needs numbers above 0.
        low = min(numbers)
        return cls(name, x, low=low, high=max(numbers), log=log and low > 0)

    def y(self, text: str) -> float:
        """Return where a value lies, in pixels from the top."""
        if self.texts:
            place: float = self.texts.index(text)
            last: float = len(self.texts) - 1
        else:
            place = self._scaled(float(text)) - self._scaled(self.low)
            last = self._scaled(self.high) - self._scaled(self.low)
        share = place / last if last else 0.5  # a lone value is in the middle
        return _BOTTOM - share * (_BOTTOM - _TOP)

    def _scaled(self, value: float) -> float:
        """Return how far up a value is, before the axis is stretched to its height."""
        if self.log:
            return math.log(value)
        return value

    def draw(self) -> str:
        """Return the axis with its name above it and its values beside it."""
        # Labels by the value that they stand beside.
        if self.texts:
            ticks = {text: text[:24] for text in self.texts[:_CHOICES_SHOWN]}
        else:
            ticks = {repr(value): number(value) for value in (self.low, self.high)}

        parts = [
            f'<line x1="{self.x:.1f}" x2="{self.x:.1f}" y1="{_TOP}" y2="{_BOTTOM}"/>',
            f'<text class="name" x="{self.x:.1f}" y="20" text-anchor="middle">'
            f"{escape(self.name)}</text>",
        ]
        for text, label in ticks.items():
            y = self.y(text)
            # Above the line of its trials; at the bottom below it, so that no line crosses it.
            y += 16 if y == _BOTTOM else -4
            parts.append(f'<text x="{self.x + 6:.1f}" y="{y:.1f}">{escape(label)}</text>')

        return f"<g>{''.join(parts)}</g>"


def readable(text: str) -> str:
    """Return a value as the table shows it: a long number with four digits."""
    value = _number(text)
    if value is None or len(text) < 7:
        return text
    return number(value)


def _number(text: str) -> float | None:
    """Return a text as a number, or None if it is not a finite one."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
