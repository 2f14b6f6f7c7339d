"""The part of a page that is on a search: its trials as lines over parallel axes, and the weight of each setting.

Plain SVG in the page's own colours. Not for choosing trials, nor for reading a sweep's folder (library/sweep/page).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from kubetune.base.humanize import number

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 960, 340, 70, 46, 300
_CHOICES_SHOWN = 12


@dataclass(frozen=True)
class Setting:
    """A setting that was searched; `log`: on a logarithmic scale. `importance`: its share, where that is known."""

    name: str
    log: bool = False
    importance: float | None = None


@dataclass(frozen=True)
class Attempt:
    """A trial: the text of each setting's value, and the metric, None where it has none. `state`: how it ended."""

    label: str
    state: str
    values: tuple[str, ...]
    value: float | None
    spread: float | None
    steps: str
    why: str


@dataclass(frozen=True)
class SearchFacts:
    """A search as a page tells of it. `attempts`: the best first; `lines`: what is to be said of it."""

    name: str
    metric: str
    settings: tuple[Setting, ...]
    attempts: tuple[Attempt, ...]
    lines: tuple[str, ...]

    @property
    def importances(self) -> list[tuple[str, float]]:
        """Settings with their importance, the largest first."""
        known = [(one.name, one.importance) for one in self.settings if one.importance is not None]
        return sorted(known, key=lambda pair: -pair[1])

    @property
    def figure(self) -> Markup:
        """The parallel axes as SVG."""
        columns = [
            _Axis.of([a.values[i] for a in self.attempts], s.log)
            for i, s in enumerate(self.settings)
        ]
        measured = _Axis.of(
            ["" if a.value is None else repr(a.value) for a in self.attempts], log=False
        )
        places = [
            _LEFT + (_WIDTH - 2 * _LEFT) * i / max(1, len(columns)) for i in range(len(columns) + 1)
        ]  # fmt: skip
        names = [*(one.name.rpartition(".")[2] for one in self.settings), self.metric]
        # Drawn last is seen best: those given up lie under those that are done, and the best on top.
        lines = [
            self._line(i, [*columns, measured], places) for i in reversed(range(len(self.attempts)))
        ]
        axes = [
            axis.draw(name, x)
            for axis, name, x in zip([*columns, measured], names, places, strict=True)
        ]
        about = (
            f"{len(self.attempts)} trials over {', '.join(names)}; the table below says the same"
        )
        return Markup(
            f'<svg class="parallel" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(about)}">'
            + "".join(lines)
            + "".join(axes)
            + "</svg>"
        )

    def _line(self, index: int, axes: Sequence[_Axis], places: Sequence[float]) -> str:
        attempt = self.attempts[index]
        texts = [*attempt.values, *([repr(attempt.value)] if attempt.value is not None else [])]
        points = " ".join(
            f"{x:.1f},{axis.at(text):.1f}"
            for axis, text, x in zip(axes, texts, places, strict=False)
        )
        kind = "best" if index == 0 and attempt.state == "done" else attempt.state.replace(" ", "-")
        said = f"trial {attempt.label}: {self.metric} {number(attempt.value)}, {attempt.state}"
        return f'<polyline class="{escape(kind)}" points="{points}"><title>{escape(said)}</title></polyline>'


@dataclass(frozen=True)
class _Axis:
    """An axis: numbers between two ends, or texts one above the other."""

    texts: tuple[str, ...]
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    @classmethod
    def of(cls, texts: Sequence[str], log: bool) -> _Axis:
        known = [text for text in dict.fromkeys(texts) if text]
        values = [found for text in known if (found := _number(text)) is not None]
        if len(values) < len(known) or not values:
            return cls(tuple(sorted(known)))
        return cls((), min(values), max(values), log and min(values) > 0)

    def at(self, text: str) -> float:
        """The height of a value."""
        if self.texts:
            share = (
                self.texts.index(text) / max(1, len(self.texts) - 1) if len(self.texts) > 1 else 0.5
            )
        else:
            ends = [self._scaled(value) for value in (self.low, self.high)]
            share = (
                (self._scaled(float(text)) - ends[0]) / (ends[1] - ends[0])
                if ends[1] > ends[0]
                else 0.5
            )
        return _BOTTOM - share * (_BOTTOM - _TOP)

    def _scaled(self, value: float) -> float:
        return math.log(value) if self.log else value

    def draw(self, name: str, x: float) -> str:
        """The axis with its name above it, and its values."""
        shown = self.texts[:_CHOICES_SHOWN] or tuple(
            dict.fromkeys((repr(self.low), repr(self.high)))
        )
        words = [(self.at(text), text if self.texts else number(float(text))) for text in shown]
        told = "".join(
            f'<text x="{x + 6:.1f}" y="{y + (16 if y == _BOTTOM else -4):.1f}">{escape(word[:24])}</text>'
            for y, word in words
        )
        line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_BOTTOM}"/>'
        return f'<g>{line}<text class="name" x="{x:.1f}" y="20" text-anchor="middle">{escape(name)}</text>{told}</g>'


def readable(text: str) -> str:
    """A value with four digits where it is a number."""
    return text if (value := _number(text)) is None or len(text) < 7 else number(value)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
