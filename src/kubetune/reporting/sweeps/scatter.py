"""The trials of a sweep as dots, as SVG in the page's own colours: a setting against the metric, or one after the other.

    learning_rate  74 % of the spread           best so far
    2.1     o                                   2.1  o
                o                                    ‾‾|__o__
    1.4             O       the best: larger    1.4          |O
         1e-5     1e-3                               0   1   2

sweep.js names the trial that the pointer is on; it finds the dots by `data-trial`, as it finds lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from kubetune.base.humanize import share
from kubetune.reporting.look.metric_values import label_of
from kubetune.reporting.sweeps.facts import SweepFacts
from kubetune.reporting.sweeps.parallel import colour, scale_of, scale_of_results
from kubetune.reporting.sweeps.scales import NumberScale, Scale

_APART = 34  # pixels between the labels below the dots, at least


@dataclass(frozen=True)
class _Box:
    """Bounds of the dots, in pixels from the upper left corner. Around them are ticks and names."""

    width: int
    height: int
    look: str = ""  # classes of the figure, besides its own
    left: int = 44
    top: int = 30

    def x(self, height: float) -> float:
        """Return where a value lies; `height` on its scale is 0 to 1."""
        return self.left + height * (self.width - 20 - self.left)

    def y(self, height: float) -> float:
        """Return where a result lies."""
        return self.bottom - height * (self.bottom - self.top)

    @property
    def bottom(self) -> int:
        """The lowest result."""
        return self.height - 40


@dataclass(frozen=True)
class _Figure:
    """Dots in their order from left to right, with what is written around them."""

    name: str
    remark: str
    below: str  # what the values are, where the name does not say it
    title: str
    scale: Scale
    values: Mapping[int, str | None]  # by the number of a trial


def draw(sweep: SweepFacts) -> list[Markup]:
    """Return a figure for each setting, that which matters most first; none without two results, which show nothing."""
    of_results = _results(sweep)
    if of_results is None:
        return []
    figures = []
    settings = sorted(enumerate(sweep.settings), key=lambda pair: -(pair[1].importance or 0))
    for index, setting in settings:
        part = setting.importance
        figure = _Figure(
            name=setting.key,
            remark="" if part is None else f"{share(part)} of the spread",
            below="",
            title=f"{label_of(sweep.metric)} by {setting.key}",
            scale=scale_of(setting),
            values={trial.number: trial.values[index] for trial in sweep.trials},
        )
        figures.append(_drawn(sweep, figure, of_results, _Box(350, 220)))
    return figures


def course(sweep: SweepFacts) -> list[Markup]:
    """Return the results one after the other, and a line of the best so far; none without two results.

    There is a figure for a wide window, and one for a phone.
    """
    of_results = _results(sweep)
    if of_results is None:
        return []
    numbers = [trial.number for trial in sweep.trials]
    figure = _Figure(
        name=label_of(sweep.metric),
        remark="line: the best so far",
        below="trial",
        title=f"{label_of(sweep.metric)} of each trial, and the best so far",
        scale=NumberScale(min(numbers), max(numbers), whole=True),
        values={number: str(number) for number in numbers},
    )
    return [
        _drawn(sweep, figure, of_results, box, _best_so_far(sweep, figure, of_results, box))
        for box in (_Box(640, 250, "wide"), _Box(330, 230, "tall"))
    ]


def _results(sweep: SweepFacts) -> NumberScale | None:
    """Return the scale of the results, None of those that are all alike."""
    scale = scale_of_results(sweep)
    return None if scale is None or scale.high <= scale.low else scale


def _best_so_far(sweep: SweepFacts, figure: _Figure, of_results: NumberScale, box: _Box) -> str:
    """Return a line that falls, or rises, with each trial that is better than all before it."""
    path = ""
    best: float | None = None
    for trial in sorted(sweep.trials, key=lambda trial: trial.number):
        if trial.result is None or trial.state != "done":
            continue
        x = box.x(figure.scale.height(str(trial.number)) or 0)
        if best is None or (trial.result > best) == sweep.greater:
            best = trial.result
        y = box.y(of_results.height(repr(best)) or 0)
        path += f"H{x:.1f}V{y:.1f}" if path else f"M{x:.1f},{y:.1f}"
    return f'<path class="so-far" d="{path}H{box.x(1):.1f}"/>' if path else ""


def _drawn(
    sweep: SweepFacts, figure: _Figure, of_results: NumberScale, box: _Box, line: str = ""
) -> Markup:
    """Return a figure. What has no result or no value is in the table alone."""
    parts = [_ticks_of_results(of_results, box), _ticks_of_values(figure.scale, box), line]
    # The best is drawn last, over all others.
    for trial in reversed(sweep.trials):
        text = figure.values[trial.number]
        if trial.result is None or text is None:
            continue
        across = figure.scale.height(text)
        up = of_results.height(repr(trial.result))
        if across is None or up is None:
            continue
        look = f"trial {trial.state.replace(' ', '-')} {colour(up, sweep)}"
        radius = 4
        if trial == sweep.best:
            look += " best"
            radius = 7
        parts.append(
            f'<circle class="{look}" data-trial="{trial.number}" cx="{box.x(across):.1f}" '
            f'cy="{box.y(up):.1f}" r="{radius}"/>'
        )
    parts.append(
        f'<text class="name" x="0" y="12">{escape(figure.name)}</text>'
        f'<text x="{box.x(1)}" y="12" text-anchor="end">{escape(figure.remark)}</text>'
        f'<text x="{box.x(0.5)}" y="{box.height - 4}" text-anchor="middle">{escape(figure.below)}</text>'
    )
    title = f"{figure.title}; the table of trials says the same"
    look = f"scatter {box.look}".strip()
    return Markup(
        f'<svg class="{look}" viewBox="0 0 {box.width} {box.height}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


def _ticks_of_results(scale: NumberScale, box: _Box) -> str:
    """Return the lines and numbers of the metric, left of the dots."""
    parts = []
    for tick in scale.ticks():
        y = box.y(tick.height)
        parts.append(
            f'<line class="grid" x1="{box.x(0)}" x2="{box.x(1)}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{box.left - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(tick.label)}</text>'
        )
    return "".join(parts)


def _ticks_of_values(scale: Scale, box: _Box) -> str:
    """Return the lines and values of a setting, below the dots; a label that would lie on another is left out."""
    parts = []
    free_from = 0.0
    for tick in scale.ticks():
        x = box.x(tick.height)
        if x < free_from:
            continue
        free_from = x + max(_APART, 7 * len(tick.label))
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{box.top}" y2="{box.bottom}"/>'
        )
        parts.append(
            f'<text x="{x:.1f}" y="{box.bottom + 18}" text-anchor="middle">{escape(tick.label)}</text>'
        )
    return "".join(parts)
