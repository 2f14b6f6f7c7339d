"""The classes of a classifier as the point of its run shows them: how well each is bars, the worst first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kubetune.base.humanize import counted, share
from kubetune.reporting.reading import RunRecord

_MOST = 10  # that are named


@dataclass(frozen=True)
class Classes:
    """A bar for each class."""

    title: str
    rows: Sequence[tuple[str, float, str, str]]  # name, part of 1, the same as text, a remark
    more: int  # that are not named


def classes_of(run: RunRecord) -> Classes | None:
    """Return the F1 of each class, the lowest first; without a confusion matrix its share of the rows; else None."""
    by_f1 = f1_by_class(run.evaluation)
    if by_f1:
        matrix = zip(run.evaluation["names"], run.evaluation["confusion"], strict=True)
        counts = {str(name): sum(row) for name, row in matrix}
        names = sorted(counts, key=lambda name: (name not in by_f1, by_f1.get(name)))
        bars = [
            (name, by_f1[name], share(by_f1[name]), counted(counts[name], "row"))
            if name in by_f1
            else (name, 0.0, "–", "no rows")
            for name in names
        ]
        return Classes("F1 by class, the lowest first", bars[:_MOST], len(bars[_MOST:]))
    train = (run.data.get("splits") or {}).get("train") or {}
    classes: Mapping[str, int] = train.get("classes") or {}
    labels = sum(classes.values())
    if not labels:
        return None
    by_count = sorted(classes.items(), key=lambda item: item[1])
    bars = [
        (name, count / labels, share(count / labels), counted(count, "row"))
        for name, count in by_count
    ]
    title = "Training rows by class; Evaluate tells the F1 of each"
    return Classes(title, bars[:_MOST], len(bars[_MOST:]))


def f1_by_class(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Return the F1 of each class by the confusion matrix of `kubetune evaluate`; empty without one.

    A row is a true class, a column a predicted one; 8 2 / 1 3 → F1 16 / 19 of the first, 6 / 9 of the second.
    """
    counts = evaluation.get("confusion") or []
    by_class = {}
    for index, name in enumerate(evaluation.get("names") or ()):
        right = counts[index][index]
        both = sum(counts[index]) + sum(row[index] for row in counts)
        # A class that is neither there nor predicted has none.
        if both:
            by_class[str(name)] = 2 * right / both
    return by_class
