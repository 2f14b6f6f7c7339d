"""The winner of a sweep: its run file, and how sure one can be of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kubetune.base.files import write_atomic
from kubetune.base.humanize import number
from kubetune.config.resolved import as_yaml, dotted_values, resolved
from kubetune.config.schema import Config
from kubetune.errors import ConfigError
from kubetune.library.sweep.ranges import short_text
from kubetune.library.sweep.sweep_record import BEST, Record, Search, Trial, summary

# Student's t for 1, 2, … degrees of freedom: two-sided, 95 %.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


def best_of(record: Record, search: Search) -> Trial:
    """Return the best trial that is done. Raise ConfigError if there is none."""
    ranked = record.ranked(greater=search.greater)
    if not ranked:
        raise ConfigError("no trial of this sweep is done yet, so there is no best one")
    return ranked[0]


def noise(first: Trial, second: Trial) -> str | None:
    """Return a sentence if chance alone may explain the difference of two trials, else None.

    Both trials use the same seeds, so their runs are compared in pairs (a paired t-test at 95 %):

        seed            42     43     44
        first trial    0.50   0.58   0.54
        second trial   0.55   0.57   0.59
        difference    -0.05   0.01  -0.05      mean -0.03, standard error 0.02

        margin = t x standard error = 4.30 x 0.02 = 0.086, which is more than 0.03: noise
    """
    # A run without a value failed, and so has no pair.
    differences = []
    for run, other in zip(first.runs, second.runs, strict=False):
        if run.value is not None and other.value is not None:
            differences.append(run.value - other.value)
    count = len(differences)
    if count < 2:
        return None

    difference = statistics.fmean(differences)
    standard_error = statistics.stdev(differences) / math.sqrt(count)
    # Above ten degrees of freedom, t hardly changes.
    margin = _T95[min(count - 2, len(_T95) - 1)] * standard_error
    if abs(difference) > margin:
        return None
    measured = f"they differ by {abs(difference):.3g} ± {margin:.3g} over {count} seeds"
    return f"within noise of trial {second.number}: {measured}"


def result_lines(record: Record, search: Search) -> Iterator[str]:
    """Yield the best trial's value and settings, then how much better it is than the second."""
    best = record.ranked(greater=search.greater)[0]
    value = f"{best.value:.5g}"
    if best.spread is not None:
        value += f" ± {best.spread:.3g}"
    yield f"trial {best.number}: {search.metric} {value} with {short_text(best.values)}"
    sentence = lead_of(record, search)
    if sentence:
        yield sentence


def lead_of(record: Record, search: Search) -> str:
    """Return a sentence on how sure one can be that the best trial is better than the second, or ""."""
    ranked = record.ranked(greater=search.greater)
    if len(ranked) < 2:
        return ""
    best, second = ranked[:2]
    sentence = noise(best, second)
    if sentence:
        return sentence
    if best.spread is not None:
        return ""
    advice = "use --repeat 3 to see how much of the difference is chance"
    return f"trial {second.number} is next: {second.value:.5g}; {advice}"


def write_best(folder: Path, config: Config, base: Config, record: Record, search: Search) -> Path:
    """Write the winner's config as a run file for `kubetune train`; comments say what it changes.

    `base` is the config of the run file that was searched.
    """
    # `greater_is_better` is written only where it is not what the metric's name says.
    training = config.training.model_copy(update={"pause_at_step": None, "greater_is_better": None})
    if training.prefers_greater != search.greater:
        training = training.model_copy(update={"greater_is_better": search.greater})
    # A trial has a name, an output and the like of its own, which the user's run does not want.
    winner = config.model_copy(
        update={
            "name": base.name,
            "output": base.output,
            "mirror": base.mirror,
            "push": base.push,
            "logging": base.logging,
            "training": training,
        }
    )

    # The file begins with the result, and with every setting that is not as in the run file.
    lines = [f"Written by kubetune sweep, of {summary(record)}.", *result_lines(record, search)]
    before = dict(_leaves(resolved(base)))
    for key, value in _leaves(resolved(winner)):
        if value != before.get(key):
            lines.append(f"{key}: {number(before.get(key))} → {number(value)}")
    comments = "".join(f"# {line}\n" for line in lines)
    path = folder / BEST
    write_atomic(path, comments + as_yaml(winner))
    return path


def _leaves(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all values with their keys, also those inside lists: `data.train[0].weight`."""
    for key, value in dotted_values(data):
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for index, item in enumerate(value):
                yield from _leaves(item, f"{prefix}{key}[{index}].")
        else:
            yield prefix + key, value
