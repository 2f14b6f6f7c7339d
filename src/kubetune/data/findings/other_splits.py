"""The finding that a folder of training data holds files of other splits too, by their names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kubetune.base.humanize import place
from kubetune.config.schema import SourceConfig
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
