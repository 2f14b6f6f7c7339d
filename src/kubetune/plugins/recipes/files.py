"""The files of a data set, here or on the hub.

What the hub is asked for is fetched file by file into its cache, once, and read from there: the JSON lists of these
data sets cannot be streamed by their library without holding all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kubetune.config.data_files import is_read, readable_endings
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
        repo = source.removeprefix(HUB)
        return _by_split(source, hub_files(repo), names, lambda name: fetched(repo, name))
    place = Path(source).expanduser()
    if place.is_dir():
        names_in_folder = sorted(file.name for file in place.iterdir() if file.is_file())

        def file_in_folder(name: str) -> Path:
            require_in_folder(place / name, place)
            return place / name

        return _by_split(source, names_in_folder, names, file_in_folder)
    if not place.is_file():
        raise DataError(
            f"{source} does not exist; expected a file, a folder, or hub:OWNER/NAME. Nothing was written."
        )
    if not is_read(place):
        raise DataError(
            f"{source} is of an unknown kind; expected {readable_endings()}. Nothing was written."
        )
    if are_given and len(names) > 1:
        raise ConfigError(
            f"--split {','.join(names)}: {source} is one file, so give one split, or its folder. "
            "Nothing was written."
        )
    # FIRE-test.json is of the split `test`; a file of another name counts as the first split.
    for split in names:
        if _is_of(split, place.name):
            return {split: [place]}
    return {names[0]: [place]}


def _by_split(
    source: str, files: Sequence[str], splits: Sequence[str], path_of: Callable[[str], Path]
) -> dict[str, list[Path]]:
    """Return the names of files by the split that they hold, as the names say. Raise DataError where one has none."""
    readable = [file for file in files if is_read(file)]
    by_split = {}
    for split in splits:
        by_split[split] = [file for file in readable if _is_of(split, file)]
        if not by_split[split]:
            names = ", ".join(readable[:12]) or "no data files"
            raise DataError(
                f"{source} has no file for split {split!r}; found {names}. Nothing was written."
            )
    # Only when each split has files: to fetch them takes long.
    return {split: [path_of(file) for file in chosen] for split, chosen in by_split.items()}


def _is_of(split: str, file: str) -> bool:
    """True for train.json, FIRE-train.json and train-00000-of-00005.parquet, of the split `train`."""
    word = re.escape(split.lower())
    return re.search(rf"(^|[^a-z]){word}([^a-z]|$)", Path(file).name.lower()) is not None


def hub_files(repo: str) -> list[str]:
    """Return the names of the files of a data set of the hub; offline, of those in its cache."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import OfflineModeIsEnabled

    with explained_hub_errors(repo, kind="dataset"):
        try:
            names = HfApi(token=hub_token()).list_repo_files(repo, repo_type="dataset")
        # Offline there is no list of the hub's, but what was fetched before is on disk.
        except OfflineModeIsEnabled:
            folder = Path(snapshot_download(repo, repo_type="dataset", local_files_only=True))
            names = [str(file.relative_to(folder)) for file in folder.rglob("*")]
    return sorted(names)


def fetched(repo: str, name: str) -> Path:
    """Return a file of a data set of the hub in its cache, where it is fetched to if it is not there yet."""
    from huggingface_hub import hf_hub_download

    with explained_hub_errors(repo, kind="dataset"):
        return Path(hf_hub_download(repo, name, repo_type="dataset", token=hub_token()))
