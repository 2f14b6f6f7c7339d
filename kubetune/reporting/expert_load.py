"""Load of a mixture's experts as a page shows it: for each layer, how many experts got how much."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

EDGES: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
HEADINGS: Final = ("none", "< ¼", "¼–½", "½–1", "1–2", "2–4", "≥ 4")
"""Loads of experts, as multiples of their layer's mean."""


class ExpertLoad(NamedTuple):
    """`rows`: of each layer its name, the number of its experts under each of HEADINGS, the fullest with its multiple
    of the mean, and the emptiest with its own. `dropped`: tokens that an expert had no room for, of all layers; None
    where nobody counted them."""

    steps: tuple[int, int]
    rows: list[tuple[str, list[int], tuple[int, float], tuple[int, float]]]
    dropped: int | None = None
    headings: tuple[str, ...] = HEADINGS


def expert_load(found: Mapping[str, Any]) -> ExpertLoad | None:
    """The load that `experts.json` holds; None where there is none."""
    if not found.get("layers"):
        return None
    first, last = found["steps"]
    rows = [_row(name, counts) for name, counts in found["layers"].items()]
    return ExpertLoad((first, last), rows, found.get("dropped_tokens"))


def _row(
    name: str, counts: list[int]
) -> tuple[str, list[int], tuple[int, float], tuple[int, float]]:
    mean = sum(counts) / len(counts) or 1.0
    parts = [count / mean for count in counts]
    bars = [0] * len(HEADINGS)
    for part in parts:
        bars[1 + sum(part >= edge for edge in EDGES) if part else 0] += 1
    order = sorted(range(len(parts)), key=parts.__getitem__)
    return name, bars, (order[-1], parts[order[-1]]), (order[0], parts[order[0]])
