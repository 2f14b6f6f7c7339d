"""Files that are named by the split that they are of: train.jsonl, data/test-00000-of-00001.parquet, dev/a.csv.

The words are those by which Hugging Face's `datasets` knows them.
"""

from __future__ import annotations

import glob
import os.path
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from kubetune.config.schema import SourceConfig
from kubetune.data.reading.sources import Located, locate
from kubetune.errors import DataError

SPLIT_WORDS: Final[Mapping[str, frozenset[str]]] = {
    "train": frozenset(("train", "training")),
    "validation": frozenset(("validation", "valid", "val", "dev")),
    "test": frozenset(("test", "testing", "eval", "evaluation")),
}


# Digits of the number of a part, and parts that are looked for.
_FEWEST_DIGITS: Final = 2
_MOST_PARTS: Final = 100_000


class LocatedSource(NamedTuple):
    """A source with its place."""

    source: SourceConfig
    located: Located


def located_sources(sources: Sequence[SourceConfig]) -> list[LocatedSource]:
    """Return the sources that can be found. Their files are listed here, once for all findings about names."""
    located = []
    for source in sources:
        # The reader of the others says what is wrong with them.
        with suppress(DataError):
            located.append(LocatedSource(source, locate(source)))
    return located


class NamedFiles(NamedTuple):
    """The files of a folder or a pattern by their split, some of which is not to be trained on."""

    folder: str  # that all of them lie in, as the source has it
    train: tuple[str, ...]  # paths below the folder
    validation: tuple[str, ...]
    test: tuple[str, ...]
    others: tuple[str, ...]  # whose names say nothing

    @property
    def held_out(self) -> tuple[str, ...]:
        """The files that are not named to be trained on."""
        return (*self.validation, *self.test)

    def path_of(self, files: Sequence[str]) -> str:
        """Return a path or pattern that means these files and no others; empty if none does.

        In the folder `d`:
        train.jsonl                          →  d/train.jsonl
        test/a.csv, test/b.csv               →  d/test, if no other file is in it
        train-0.parquet, train-1.parquet     →  d/train*.parquet, if it matches no other file
        a/train.csv, b/train.csv             →  nothing
        """
        if len(files) == 1:
            return os.path.join(self.folder, files[0])

        if not files or glob.has_magic(self.folder):
            return ""
        every = (*self.train, *self.held_out, *self.others)
        parent = os.path.commonpath(files)
        in_parent = {file for file in every if file.startswith(f"{parent}/")}
        if parent and in_parent == set(files):
            return os.path.join(self.folder, parent)

        if len({os.path.dirname(file) for file in files}) > 1:
            return ""

        names = [os.path.basename(file) for file in files]
        word = re.split(r"[-._ 0-9]", names[0])[0]
        end = "".join(Path(names[0]).suffixes)
        path = os.path.join(self.folder, parent, f"{word}*{end}")
        meant = {os.path.expanduser(os.path.join(self.folder, file)) for file in files}
        matched = set(glob.glob(os.path.expanduser(path)))
        return path if matched == meant else ""


def split_of(file: str) -> str:
    """Return train, validation or test by a file's name, or the folder that it is in; empty if neither says it."""
    for part in reversed(file.split("/")):
        words = set(re.split(r"[-._ 0-9]+", part.lower()))
        splits = [split for split, names in SPLIT_WORDS.items() if not names.isdisjoint(words)]
        if splits:
            # `train_test.jsonl` may be either.
            return splits[0] if len(splits) == 1 else ""
    return ""


def named_files(located: Located) -> NamedFiles | None:
    """Return the files of a source by split; None unless it has some to evaluate on among others.

    Whoever names a single file, or a folder that holds only test data, means them.
    """
    if len(located.files) < 2:
        return None

    folder = located.path
    while glob.has_magic(folder) and not os.path.exists(os.path.expanduser(folder)):
        folder = os.path.dirname(folder)

    by_split: dict[str, list[str]] = {"train": [], "validation": [], "test": [], "": []}
    for place in located.files:
        file = os.path.relpath(place, os.path.expanduser(folder or "."))
        by_split[split_of(Path(file).as_posix())].append(file)

    files = NamedFiles(folder, *map(tuple, by_split.values()))
    has_others = bool(files.train or files.others)
    return files if files.held_out and has_others else None


# `train-00000-of-00003.parquet`, as many tools name the parts of one data set.
_PART: Final = re.compile(r"(.*?)(\d+)([-_. ]of[-_. ])(\d+)(\D*)")


def missing_parts(files: Sequence[Path]) -> list[str]:
    """Return the files that a source lacks by the names of the others, below its folder; none for a single file.

    train-00000-of-00003.jsonl, train-00002-of-00003.jsonl  →  train-00001-of-00003.jsonl
    """
    if len(files) < 2:
        return []
    missing = []
    seen = set()
    for file in files:
        named = _PART.fullmatch(file.name)
        # Names with another number of digits count something else, such as pages.
        if named is None or len(named[2]) != len(named[4]) or len(named[4]) < _FEWEST_DIGITS:
            continue
        begin, number, of, count, end = named.groups()
        key = (file.parent, begin, count, end)
        if key in seen or int(count) > _MOST_PARTS:
            continue
        seen.add(key)
        digits = len(number)
        names = [f"{begin}{part:0{digits}}{of}{count}{end}" for part in range(int(count) + 1)]
        held = [(file.parent / name).exists() for name in names]
        # Some count from 1.
        first = 1 if held[-1] and not held[0] else 0
        for part in range(first, first + int(count)):
            if not held[part]:
                missing.append(names[part])
    return missing
