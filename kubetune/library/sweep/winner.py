"""The winner of a sweep: its run file, and how sure one can be of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kubetune.base.files import write_atomic
from kubetune.base.humanize import number
from kubetune.config.load import as_yaml, dotted_values, resolved
from kubetune.config.naming import prefers_greater
from kubetune.config.schema import Config
from kubetune.errors import ConfigError
from kubetune.library.sweep.ranges import told as words
from kubetune.library.sweep.record import BEST, Record, Search, Trial, summary

_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Student's t for 95 % with 1, 2, … degrees of freedom, two-sided."""


def best_of(record: Record, search: Search) -> Trial:
    """The best trial that is done. Raises ConfigError where none is."""
    ranked = record.ranked(greater=search.greater)
    if not ranked:
        raise ConfigError("no trial of this sweep is done yet, so there is no best one")
    return ranked[0]


def noise(first: Trial, second: Trial) -> str | None:
    """Words for that two trials differ by no more than their seeds make; None where they differ by more.

    By the differences of the runs with equal seeds, of which the mean's 95 % interval holds 0 (Student's t).
    """
    pairs = [
        one.value - other.value
        for one, other in zip(first.runs, second.runs, strict=False)
        if one.value is not None and other.value is not None
    ]
    if len(pairs) < 2:
        return None
    middle = sum(pairs) / len(pairs)
    error = math.sqrt(sum((each - middle) ** 2 for each in pairs) / (len(pairs) - 1) / len(pairs))
    margin = _T95[min(len(pairs) - 2, len(_T95) - 1)] * error
    if abs(middle) > margin:
        return None
    differ = f"they differ by {abs(middle):.3g} ± {margin:.3g} over {len(pairs)} seeds"
    return f"within noise of trial {second.number}: {differ}"


def told(record: Record, search: Search) -> Iterator[str]:
    """The best trial in words: its values, its measure, and how it stands to the next."""
    ranked = record.ranked(greater=search.greater)
    first = ranked[0]
    spread = f" ± {first.spread:.3g}" if first.spread is not None else ""
    yield f"trial {first.number}: {search.metric} {first.value:.5g}{spread} with {words(first.values)}"
    if len(ranked) > 1 and (said := noise(first, ranked[1])):
        yield said
    elif len(ranked) > 1 and first.spread is None:
        yield f"trial {ranked[1].number} is next: {ranked[1].value:.5g}; how much of that is chance, --repeat 3 tells"


def write_best(folder: Path, config: Config, base: Config, record: Record, search: Search) -> Path:
    """Write the winner's run file, which `kubetune train` takes, with what it changed above it.

    `base`: the config without a trial's values, of which name and output are kept.
    """
    training = config.training.model_copy(update={"pause_at_step": None, "greater_is_better": None})
    if prefers_greater(training) != search.greater:
        training = training.model_copy(update={"greater_is_better": search.greater})
    kept = config.model_copy(
        update={
            **{key: getattr(base, key) for key in ("name", "output", "mirror", "push", "logging")},
            "training": training,
        }
    )
    before, after = (dict(_leaves(resolved(one))) for one in (base, kept))
    lines = [f"Written by kubetune sweep, of {summary(record)}.", *told(record, search)]
    changed = [key for key in after if after[key] != before.get(key)]
    lines += [f"{key}: {number(before.get(key))} → {number(after[key])}" for key in changed]
    text = "".join(f"# {line}\n" for line in lines) + as_yaml(kept)
    path = folder / BEST
    write_atomic(path, text)
    return path


def _leaves(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted values, those of entries of lists among them: `data.train[0].weight`."""
    for inner, value in dotted_values(data):
        key = f"{path}.{inner}".removeprefix(".")
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            for i, each in enumerate(value):
                yield from _leaves(each, f"{key}[{i}]")
        else:
            yield key, value
