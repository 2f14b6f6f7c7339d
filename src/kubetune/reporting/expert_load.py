"""The load of a mixture's experts as a page shows it: for each layer, how many experts got how much."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

# Loads of experts, as multiples of the mean of their layer.
EDGES: Final = (1e-9, 0.25, 0.5, 1.0, 2.0, 4.0)
HEADINGS: Final = ("none", "< ¼", "¼–½", "½–1", "1–2", "2–4", "≥ 4")


class LayerLoad(NamedTuple):
    """The load of one layer's experts."""

    name: str
    counts: list[int]  # of experts under each of HEADINGS
    fullest: int  # the expert with the highest load
    load: float  # of that expert, as a multiple of the mean


class ExpertLoad(NamedTuple):
    """The load of all experts between two steps."""

    steps: tuple[int, int]
    rows: list[LayerLoad]
    # tokens of all layers that an expert had no room for; None: not counted
    dropped: int | None = None
    headings: tuple[str, ...] = HEADINGS


def expert_load(recorded: Mapping[str, Any]) -> ExpertLoad | None:
    """Return the load that `experts.json` holds, or None if it holds none."""
    if not recorded.get("layers"):
        return None
    first, last = recorded["steps"]
    rows = [_layer_load(name, tokens) for name, tokens in recorded["layers"].items()]
    return ExpertLoad((first, last), rows, recorded.get("dropped_tokens"))


def _layer_load(name: str, tokens: list[int]) -> LayerLoad:
    """Count a layer's experts by load. `tokens`: how many each expert got.

    Example: experts with 0, 1, 1 and 6 tokens have a mean of 2, so their loads are 0, ½, ½ and 3:
    one under "none", two under "½–1" and one under "2–4".
    """
    mean = sum(tokens) / len(tokens) or 1.0
    loads = [count / mean for count in tokens]
    counts = [0] * len(HEADINGS)
    for load in loads:
        # No load at all lies below the first edge.
        heading = bisect_right(EDGES, load)
        counts[heading] += 1

    load = max(loads)
    return LayerLoad(name, counts, loads.index(load), load)
