"""Findings about the files of a run beside each other: trained on by their folder alone, or read in two ways."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kubetune.base.humanize import place
from kubetune.config.schema import DataConfig, SourceConfig
from kubetune.data.column_words import in_yaml
from kubetune.data.findings.finding import Finding
from kubetune.data.findings.split_files import named_files
from kubetune.errors import DataError

_MOST_NAMED = 4


def other_splits(sources: Sequence[SourceConfig]) -> Iterator[Finding]:
    """Yield a warning for each source of training whose files are called like those to evaluate on, and what to write."""
    for source in sources:
        try:
            files = named_files(source)
        except DataError:
            continue  # whoever reads it says what is wrong
        if files is None:
            continue
        named = ", ".join(files.held_out[:_MOST_NAMED])
        if len(files.held_out) > _MOST_NAMED:
            named += " …"
        are = "is" if len(files.held_out) == 1 else "are"
        sentence = f"train: {place(source.path)} is trained on whole, and {named} in it {are} named as data to evaluate on"
        train = files.path_of(files.train or files.others)
        held_out = files.path_of(files.validation) or files.path_of(files.test)
        advice = "Move them out of it, or name the files to train on"
        if train and held_out:
            advice = f"Give `data.train: {place(train)}` with `data.eval: {place(held_out)}`, as `kubetune init` does"
        yield Finding(
            "other_splits", "warning", "train", sentence, len(files.held_out), advice=advice
        )


def read_otherwise(data: DataConfig) -> Iterator[Finding]:
    """Yield a warning for data to evaluate on that are read by the names of their keys, where those of training are not."""
    if not isinstance(data.eval, tuple):
        return
    named = {(source.format, *sorted(source.columns.items())) for source in data.train}
    first = data.train[0]
    for source in data.eval:
        is_plain = source.format == "auto" and not source.columns
        # Of several ways, one may be that of the evaluation.
        if not is_plain or len(named) > 1 or (first.format == "auto" and not first.columns):
            continue
        keys = [] if first.format == "auto" else [f"format: {first.format}"]
        if first.columns:
            keys.append(in_yaml(first.columns))
        as_given = ", ".join(keys)
        sentence = f"eval: {place(source.path)} is read by the names of its keys, and data.train with `{as_given}`"
        advice = f"Give `data.eval: {{path: {place(source.path)}, {as_given}}}` if both have the same columns"
        yield Finding("read_otherwise", "warning", "eval", sentence, advice=advice)
