"""A verdict on a text as the page shows it: a bar for each class, or one number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kubetune.base.humanize import counted, number, visible
from kubetune.ui.site import templates

_MOST_CLASSES = 10  # that have a bar of their own


@dataclass(frozen=True)
class Bar:
    """The probability of a class."""

    name: str
    part: float  # of 1
    text: str
    is_chosen: bool = False


@dataclass(frozen=True)
class ChatVerdict:
    """Bars, or the number of a model that has no classes."""

    bars: Sequence[Bar] = ()  # the likeliest first
    number: str = ""
    unit: str = ""


def verdict_html(verdict: Mapping[str, Any]) -> str:
    """Return the part of a page that shows a verdict of `kubetune.classify`."""
    # Names of classes come from data.
    template = templates().get_template("verdict.html")
    return visible(template.render(verdict=shown_verdict(verdict)))


def shown_verdict(verdict: Mapping[str, Any]) -> ChatVerdict:
    """Return what the page shows of a verdict of `kubetune.classify`.

    {"predicted": "b", "probabilities": {"a": 0.2, "b": 0.8}}   →   ✓ b ████████ 80.0 %
                                                                      a ██       20.0 %
    """
    if "reward" in verdict:
        return ChatVerdict(number=number(verdict["reward"]), unit="reward")
    probabilities: Mapping[str, float] = verdict.get("probabilities") or {}
    predicted = verdict["predicted"]
    if not probabilities:
        return ChatVerdict(number=number(predicted))

    # A text may have several labels.
    chosen = predicted if isinstance(predicted, list) else [predicted]
    ordered = sorted(probabilities.items(), key=lambda item: item[1], reverse=True)
    bars = [Bar(name, part, _in_tenths(part), name in chosen) for name, part in ordered]
    shown = bars[:_MOST_CLASSES]
    others = bars[_MOST_CLASSES:]
    if others:
        most = others[0].part
        shown.append(Bar(counted(len(others), "other class"), most, f"≤ {_in_tenths(most)}"))
    return ChatVerdict(shown)


def _in_tenths(part: float) -> str:
    """Return a probability so that those below each other align at the point."""
    return f"{100 * part:.1f} %"
