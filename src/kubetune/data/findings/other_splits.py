"""Findings about the files of a run together: trained on by mistake, missing, or read in two ways."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kubetune.base.humanize import counted, place
from kubetune.config.schema import DataConfig, SourceConfig
from kubetune.data.column_words import in_yaml
from kubetune.data.findings.finding import Finding
from kubetune.data.findings.split_files import LocatedSource, missing_parts, named_files

_MOST_NAMED = 4


def other_splits(sources: Sequence[LocatedSource]) -> Iterator[Finding]:
    """Yield a warning for each source of training that has files named as data to evaluate on, and what to write."""
    for source, located in sources:
        files = named_files(located)
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


def lacking_parts(sources: Sequence[LocatedSource], split: str) -> Iterator[Finding]:
    """Yield a warning for each source that lacks files by the names of the files that it has."""
    for source, located in sources:
        missing = missing_parts(located.files)
        if missing:
            named = ", ".join(missing[:_MOST_NAMED])
            if len(missing) > _MOST_NAMED:
                named += " …"
            files = counted(len(missing), "file")
            sentence = (
                f"{split}: {place(source.path)} lacks {files} by the names of the others: {named}"
            )
            advice = "Fetch what is missing, or name the files that are meant"
            yield Finding("missing_parts", "warning", split, sentence, len(missing), advice=advice)


def read_otherwise(data: DataConfig) -> Iterator[Finding]:
    """Yield a warning if evaluation data are read by the names of their keys although data.train sets format or columns."""
    if not isinstance(data.eval, tuple):
        return
    ways = {_way_in_words(source) for source in data.train}
    # The evaluation may be read in one of several ways.
    if len(ways) > 1:
        return
    (of_training,) = ways
    if not of_training:
        return

    for source in data.eval:
        if _way_in_words(source):
            continue
        sentence = f"eval: {place(source.path)} is read by the names of its keys, and data.train with `{of_training}`"
        advice = f"Give `data.eval: {{path: {place(source.path)}, {of_training}}}` if both have the same columns"
        yield Finding("read_otherwise", "warning", "eval", sentence, advice=advice)


def _way_in_words(source: SourceConfig) -> str:
    """Return how a source says that it is read: `format: alpaca`; empty if by the names of its keys."""
    keys = []
    if source.format != "auto":
        keys.append(f"format: {source.format}")
    if source.columns:
        keys.append(in_yaml(dict(sorted(source.columns.items()))))
    return ", ".join(keys)
