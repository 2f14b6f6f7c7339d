"""Findings about the labels of a classifier, from the rows of each class."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

from kubetune.base.humanize import counted
from kubetune.data.findings.finding import Finding
from kubetune.data.findings.split_counts import SplitCounts

# Labels that are named.
MOST_NAMES: Final = 8


def _labels_without_rows(counts: SplitCounts) -> Iterator[Finding]:
    # Rows that must not be forgotten need not have every label.
    missing = [label for label, number in counts.stats["classes"].items() if not number]
    if not missing or counts.split == "forget":
        return
    names = ", ".join(missing[:MOST_NAMES])
    if len(missing) > MOST_NAMES:
        names += " …"

    meaning = "such labels are not measured; means over the labels leave out those that are not predicted either"
    if counts.name == "train":
        meaning = "such labels are never learned"
    yield counts.finding(
        "warning",
        "labels_without_rows",
        f"{counted(len(missing), 'label')} without rows in {counts.name}: {names}; {meaning}",
        len(missing),
        advice="`classification.labels` lists the labels that are meant",
    )


def _labels_alike(counts: SplitCounts) -> Iterator[Finding]:
    """Find labels such as `Spam` and `spam`, which are two classes."""
    if counts.split != "train":
        return
    spellings: dict[str, list[str]] = {}
    for label in counts.stats["classes"]:
        key = re.sub(r"[\s_-]+", " ", label).casefold()
        spellings.setdefault(key, []).append(label)
    groups = [" and ".join(labels) for labels in spellings.values() if len(labels) > 1]
    if not groups:
        return
    names = ", ".join(groups[:MOST_NAMES])
    if len(groups) > MOST_NAMES:
        names += " …"
    yield counts.finding(
        "warning",
        "labels_alike",
        f"labels that differ only in case or spaces: {names}; each is a class of its own",
        len(groups),
        advice="Write those that mean the same in one way",
    )


def _label_below_zero(counts: SplitCounts) -> Iterator[Finding]:
    """Name -1 beside 0 and 1: a grade as others are, or the mark of records without one of two labels."""
    number = counts.stats["classes"].get("-1", 0)
    if number and counts.split == "train" and counts.stats["classes"].keys() == {"-1", "0", "1"}:
        yield counts.finding(
            "note",
            "label_below_zero",
            f"label -1 of {counts.rows(number)} is a class, as 0 and 1 are",
            number,
            advice="Leave these records out if it marks such as have no label",
        )


LABEL_FINDERS: Final[tuple[Callable[[SplitCounts], Iterator[Finding]], ...]] = (
    _labels_without_rows,
    _labels_alike,
    _label_below_zero,
)
