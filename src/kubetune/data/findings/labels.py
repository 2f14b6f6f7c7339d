"""Findings about the labels of a classifier, from the rows of each class."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kubetune.base.humanize import counted
from kubetune.data.findings.finding import Finding
from kubetune.data.findings.split_counts import SplitCounts
from kubetune.data.text.odd_labels import joined_labels, spelt_numbers, unlabelled_words

# Labels that are named.
MOST_NAMES: Final = 8


def _labels_without_rows(counts: SplitCounts) -> Iterator[Finding]:
    # Rows that must not be forgotten need not have every label.
    missing = [label for label, number in counts.stats["classes"].items() if not number]
    if not missing or counts.split == "forget":
        return
    meaning = "such labels are not measured; means over the labels leave out those that are not predicted either"
    if counts.name == "train":
        meaning = "such labels are never learned"
    yield counts.finding(
        "warning",
        "labels_without_rows",
        f"{counted(len(missing), 'label')} without rows in {counts.name}: {_first_of(missing)}; {meaning}",
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
    yield counts.finding(
        "warning",
        "labels_alike",
        f"labels that differ only in case or spaces: {_first_of(groups)}; each is a class of its own",
        len(groups),
        advice="Write those that mean the same in one way",
    )


def _labels_for_none(counts: SplitCounts) -> Iterator[Finding]:
    """Find labels such as `none`, which are classes, or mark records that have no label."""
    if counts.split != "train" or counts.are_labels_listed:
        return
    classes = counts.stats["classes"]
    words = unlabelled_words(classes)
    if words:
        number = sum(classes[word] for word in words)
        yield counts.finding(
            "warning",
            "labels_for_none",
            f"label {_named(words)} of {counts.rows(number)} is a class, as the others are",
            number,
            advice="Leave these records out if it marks such as have no label; if it is a class, list all classes in "
            "`classification.labels`",
        )


def _labels_joined(counts: SplitCounts) -> Iterator[Finding]:
    """Find labels such as `joy|fear`, which are several classes in one text."""
    if counts.split != "train" or counts.are_labels_listed:
        return
    classes = counts.stats["classes"]
    joined = joined_labels(classes)
    if joined:
        number = sum(classes[label] for label in joined)
        example = json.dumps(next(iter(joined.values())), ensure_ascii=False)
        yield counts.finding(
            "warning",
            "labels_joined",
            f"labels that join others: {_named(list(joined))}, of {counts.rows(number)}; each is a class of its own",
            number,
            advice=f"Write such a label as a list, {example}, if each of them applies; in a table as this text",
        )


def _labels_spelt(counts: SplitCounts) -> Iterator[Finding]:
    """Find labels that are numbers to predict, in a spelling that is read as the name of a class."""
    if counts.split != "train" or counts.are_labels_listed:
        return
    spelt = spelt_numbers(counts.stats["classes"])
    if spelt:
        yield counts.finding(
            "warning",
            "labels_spelt",
            f"{counted(len(spelt), 'label')} such as {_named(spelt[:3])} are classes of their own, and seem to be numbers "
            "to predict",
            len(spelt),
            advice="Write them as numbers, such as 31 and 6.5, without signs, for `classification.problem_type: regression`",
        )


def _number_marks(counts: SplitCounts) -> Iterator[Finding]:
    """Find numbers to predict that mark rows without one, such as -999."""
    marks = counts.stats.get("number_marks", {})  # older counts lack it
    number = sum(marks.values())
    if number:
        yield counts.finding(
            "warning",
            "number_marks",
            f"label {', '.join(marks)} of {counts.rows(number)} lies far from all others, and is predicted as they are",
            number,
            advice="Leave these records out if it marks such as have no label",
        )


def _named(labels: Sequence[str]) -> str:
    """Return the first labels for a sentence, each as code."""
    return _first_of([f"`{label}`" for label in labels])


def _first_of(names: Sequence[str]) -> str:
    """Return the first names in words, with a sign where there are more."""
    listed = ", ".join(names[:MOST_NAMES])
    return f"{listed} …" if len(names) > MOST_NAMES else listed


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
    _labels_for_none,
    _labels_joined,
    _labels_spelt,
    _label_below_zero,
    _number_marks,
)
