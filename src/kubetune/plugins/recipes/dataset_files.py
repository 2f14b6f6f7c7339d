"""The files of a data set, here or on the hub.

What the hub is asked for is fetched into its cache, once, and read from there: the JSON lists of these data sets cannot
be streamed by their library without holding all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from kubetune.config.data_files import is_read
from kubetune.data.reading.hub import explained_hub_errors, hub_token
from kubetune.data.reading.sources import require_in_folder
from kubetune.errors import ConfigError, DataError

HUB = "hub:"

# The files of each split, in order.
Splits = Mapping[str, Sequence[Path]]


def locate_splits(source: str, names: Sequence[str], *, are_given: bool) -> Splits:
    """Return the files of the splits of `hub:ID`, a folder or a file. `are_given`: the user named the splits.

    Raise DataError where a split has no file, ConfigError where one file is to be several splits.
    """
    if source.startswith(HUB):
        folder = fetched(source.removeprefix(HUB), [f"*{split}*" for split in names])
        return _by_split(source, sorted(folder.rglob("*")), names)
    place = Path(source).expanduser()
    if place.is_dir():
        by_split = _by_split(source, sorted(place.iterdir()), names)
        for files in by_split.values():
            for file in files:
                require_in_folder(file, place)
        return by_split
    if not place.is_file():
        raise DataError(
            f"{source} does not exist; expected a file, a folder, or hub:OWNER/NAME. Nothing was written."
        )
    if are_given and len(names) > 1:
        raise ConfigError(
            f"--split {','.join(names)}: {source} is one file, so give one split, or its folder. "
            "Nothing was written."
        )
    # FIRE-test.json is of the split `test`; a file of another name counts as the first split.
    for split in names:
        if _is_of(split, place):
            return {split: [place]}
    return {names[0]: [place]}


def _by_split(source: str, paths: Sequence[Path], splits: Sequence[str]) -> dict[str, list[Path]]:
    """Return the data files by the split that their names say. Raise DataError where a split has none."""
    readable = [path for path in paths if is_read(path) and path.is_file()]
    by_split = {}
    for split in splits:
        by_split[split] = [file for file in readable if _is_of(split, file)]
        if not by_split[split]:
            names = ", ".join(file.name for file in readable[:12]) or "no data files"
            raise DataError(
                f"{source} has no file for split {split!r}; found {names}. Nothing was written."
            )
    return by_split


def _is_of(split: str, file: Path) -> bool:
    """True for train.json, FIRE-train.json and train-00000-of-00005.parquet, of the split `train`."""
    word = re.escape(split.lower())
    return re.search(rf"(^|[^a-z]){word}([^a-z]|$)", file.name.lower()) is not None


def fetched(repo: str, patterns: Sequence[str]) -> Path:
    """Return the folder in the hub's cache that has these files of a data set; offline, those of them that are there."""
    from huggingface_hub import snapshot_download

    with explained_hub_errors(repo, kind="dataset"):
        folder = snapshot_download(
            repo, repo_type="dataset", allow_patterns=list(patterns), token=hub_token()
        )
    return Path(folder)
