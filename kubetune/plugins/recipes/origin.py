"""Origin of the records of a data set: which files hold each of its splits, here or on the hub.

What the hub is asked for is fetched whole into its cache, once, and read from there: the JSON lists of these data sets
cannot be streamed by their library without holding all of them.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kubetune.config.data_files import ending_of, is_read, readable_endings
from kubetune.data.reading.hub import explained_hub_errors, hub_token
from kubetune.data.reading.packed import opened
from kubetune.data.reading.problems import Problems
from kubetune.data.reading.readers import count_lines, read_file
from kubetune.data.reading.record import Record
from kubetune.data.reading.sources import require_in_folder
from kubetune.data.reading.tables import parquet_rows
from kubetune.errors import ConfigError, DataError, EnvironmentFault

HUB = "hub:"


@dataclass(frozen=True, slots=True)
class Origin:
    """The files of one split, in order."""

    split: str
    files: tuple[Path, ...]

    def facts(self) -> list[dict[str, Any]]:
        """Identity of these files: a conversion goes on only from the files it began with."""
        stats = [(file, file.stat()) for file in self.files]
        return [
            {"file": str(f.resolve()), "bytes": s.st_size, "modified_ns": s.st_mtime_ns}
            for f, s in stats
        ]

    def records(self, problems: Problems) -> Iterator[Record]:
        """All records. What is none goes to `problems`; raises DataError where that is a part of a JSON list."""
        for file in self.files:
            before = problems.total
            yield from read_file(file, problems)
            if problems.total > before and ending_of(file) == ".json":
                raise DataError(f"{problems.first[-1]} {_DAMAGED}")

    def require_ends(self) -> None:
        """Raise DataError where a JSON list has no end: its download ended early, which is seen before all else."""
        for file in (file for file in self.files if file.suffix.lower() == ".json"):
            with open(file, "rb") as stream:
                begin = stream.read(_BLOCK).lstrip(codecs.BOM_UTF8 + b" \t\r\n")
                stream.seek(max(0, file.stat().st_size - _BLOCK))
                if begin.startswith(b"[") and not stream.read().rstrip().endswith(b"]"):
                    raise DataError(f"{file}: is a JSON list without an end. {_DAMAGED}")

    def estimate(self) -> int:
        """About how many records there are, without parsing them: for the bar."""
        return sum(map(_estimate, self.files))


def _estimate(file: Path) -> int:
    match ending_of(file):
        case ".parquet":
            return parquet_rows(file)
        case ".json":
            number, rest = 0, b""
            with opened(file) as stream:
                while block := stream.read(_BLOCK):
                    block = rest + block
                    number += block.count(_KEY)
                    rest = block[1 - len(_KEY) :]
            return number
        case _:
            return count_lines(file)


_BLOCK = 2**20
_KEY = b'"conversations"'
"""A key that records of these data sets have once; within their texts its quotes would stand behind backslashes."""

NOTHING = "Nothing was written."
_DAMAGED = f"The file is damaged, or its download incomplete. {NOTHING}"


def locate_splits(source: str, splits: Sequence[str], *, given: bool) -> list[Origin]:
    """The files of each split of `hub:ID`, a folder, or a file; `given` says that the user named the splits.

    Raises DataError when a split has no file, ConfigError when a single file is to be several splits.
    """
    if source.startswith(HUB):
        return _on_hub(source.removeprefix(HUB), splits)
    place = Path(source).expanduser()
    if place.is_dir():
        files = sorted(file for file in place.iterdir() if is_read(file) and file.is_file())
        for file in files:
            require_in_folder(file, place)
        return [Origin(split, _files_of(split, files, source)) for split in splits]
    if not place.is_file():
        raise DataError(
            f"{source} does not exist; expected a file, a folder, or hub:OWNER/NAME. {NOTHING}"
        )
    if not is_read(place):
        raise DataError(f"{source} is of an unknown kind; expected {readable_endings()}. {NOTHING}")
    if given and len(splits) > 1:
        raise ConfigError(
            f"--split {','.join(splits)}: {source} is one file, so give one split, or its folder. {NOTHING}"
        )
    named = [split for split in splits if _names(split, place.name)]
    return [Origin(splits[0] if given else (named or splits)[0], (place,))]


def _names(split: str, name: str) -> bool:
    """A file's name says that it holds a split: train.json, FIRE-train.json, train-00000-of-00005.parquet."""
    return (
        re.search(rf"(^|[^a-z]){re.escape(split.lower())}([^a-z]|$)", Path(name).name.lower())
        is not None
    )


def _files_of(split: str, files: Sequence[Path], source: str) -> tuple[Path, ...]:
    found = tuple(file for file in files if _names(split, file.name))
    if not found:
        names = ", ".join(file.name for file in files[:12]) or "no data files"
        raise DataError(f"{source} has no file for split {split!r}; found {names}. {NOTHING}")
    return found


@contextmanager
def asking_hub(repo: str) -> Iterator[None]:
    """Turn what goes wrong between here and the hub into errors that say what to do."""
    from huggingface_hub.errors import HfHubHTTPError

    bases: Any = HfHubHTTPError.__bases__  # one of them is what the HTTP library in use raises
    failures: tuple[type[Exception], ...] = (OSError, *bases)
    try:
        with explained_hub_errors(repo, kind="dataset"):
            yield
    except failures as error:
        if type(error).__name__ == "DatasetNotFoundError":  # of an optional library
            raise DataError(f"data set {repo}: {error} {NOTHING}") from error
        raise EnvironmentFault(
            f"data set {repo} cannot be read from the hub: {error or type(error).__name__}. Run the same command again "
            "when it can be reached: what was fetched is kept"
        ) from error


def _on_hub(repo: str, splits: Sequence[str]) -> list[Origin]:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.errors import OfflineModeIsEnabled

    with asking_hub(repo):
        try:
            names = HfApi(token=hub_token()).list_repo_files(repo, repo_type="dataset")
        except OfflineModeIsEnabled:
            folder = Path(snapshot_download(repo, repo_type="dataset", local_files_only=True))
            files = sorted(file for file in folder.rglob("*") if is_read(file))
            for file in files:
                require_in_folder(file, folder)
            return [Origin(split, _files_of(split, files, HUB + repo)) for split in splits]
        paths = sorted(Path(name) for name in names if is_read(name))
        wanted = {split: _files_of(split, paths, HUB + repo) for split in splits}
        fetch = partial(hf_hub_download, repo, repo_type="dataset", token=hub_token())
        return [
            Origin(split, tuple(Path(fetch(str(path))) for path in found))
            for split, found in wanted.items()
        ]
