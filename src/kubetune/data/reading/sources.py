"""The files that a source means, and the number of records in them.

Reading one file is readers.py's work, taking a sample selection.py's; what a record means is formats.py's.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Final

from kubetune.base.faults import fault_of
from kubetune.base.files import (
    IrregularFileError,
    read_object,
    require_inside,
    require_plain,
    require_plain_entry,
    sha256_file,
)
from kubetune.base.humanize import nearest
from kubetune.config.data_files import (
    ending_of,
    holds_other_records,
    is_hub_id,
    is_packed_otherwise,
    is_read,
    readable_endings,
    without_sample,
)
from kubetune.config.schema import SourceConfig
from kubetune.data.media import IMAGE_SUFFIXES
from kubetune.data.reading.files.columnar import as_json
from kubetune.data.reading.hub import (
    explained_hub_errors,
    hub_token,
    is_of_hub,
    require_dataset,
    unresolved_host,
)
from kubetune.data.reading.readers import count_records, features_of, read_file
from kubetune.data.reading.record import Record
from kubetune.data.reading.record_problems import Problems
from kubetune.errors import DataError, KubetuneError, causes
from kubetune.extras import require

if TYPE_CHECKING:
    from datasets import Dataset

# `data.jsonl#1000`: so many records of a source, unless there is a file of that name.
_SAMPLE: Final = re.compile(r"(.+)#([0-9]+)")
# Files with which the hub's repositories, and LLaMA-Factory, describe the data beside them.
_ABOUT_DATA: Final = ("dataset_infos.json", "dataset_info.json")
_PART: Final = (
    "A part is taken by #N after the path, or by `range`; of several files by naming them"
)


@dataclass(frozen=True, slots=True)
class Located:
    """The place of a source's data."""

    path: str  # without `#N`
    # None for a data set of the hub, or for one saved by `datasets`, which lies at `path`.
    files: tuple[Path, ...]
    sample: int | None  # the N of `path#N`
    others: tuple[Path, ...] = ()  # all else that lies in the folder of the files


def locate(source: SourceConfig) -> Located:
    """Return where a source lies. Raise DataError when nothing is there, or something that holds no records."""
    path = source.path
    sample = None
    # A file may be called `data.jsonl#1000`: then it is that file.
    if not Path(os.path.expanduser(path)).exists() and (match := _SAMPLE.fullmatch(path)):
        path = match[1]
        sample = int(match[2])
        if not sample:
            raise DataError(f"{source.path} asks for 0 samples; expected at least 1")

    if "\0" in path or "://" in path:
        raise DataError(
            f"{path!r} is no path; expected a file, a folder, a pattern such as data/*.jsonl, or a hub id"
        )

    # What is on disk comes before the hub: `org/data` may be a folder.
    place = Path(os.path.expanduser(path))
    others: tuple[Path, ...] = ()
    if not place.is_dir():
        files = _files_of(place, path)
    elif _is_saved_dataset(place):
        return Located(path, (), sample)
    else:
        files, others = _files_in(place)

    if files:
        if source.subset or source.split != "train":
            asked = f"subset: {source.subset}" if source.subset else f"split: {source.split}"
            raise DataError(
                f"{path} is read whole, and has no `{asked}`, as data sets of the hub do. {_PART}"
            )
        return Located(path, files, sample, others)

    # What is not there may still mean something: a broken link, a data set of the hub, or a wrong path.
    if place.is_symlink():
        raise DataError(
            f"{path} is a link to {os.readlink(place)}, {_broken_link(place)}. Nothing was written."
        )
    if is_hub_id(path):
        return Located(path, (), sample)
    raise DataError(f"{path} does not exist{_hint(place)}")


def _hint(place: Path) -> str:
    """Return what was probably meant by a path that leads nowhere, or else what is expected there."""
    names = []
    with contextlib.suppress(OSError):
        names = os.listdir(place.parent)
    close = nearest(place.name, names, likeness=0.7)
    if close:
        return f"; did you mean {place.parent / close}?"
    return f"; expected a file of {readable_endings()}, a folder of them, or a hub data set"


def _files_of(place: Path, path: str) -> tuple[Path, ...]:
    """Return the files that a path or pattern means; none if nothing is there. Raise DataError for what is no data."""
    if place.is_file():
        return (_known(place),)
    if place.exists():
        raise DataError(f"{path} is a device, pipe or socket; expected a file of records")
    if not any(char in path for char in "*?["):
        return ()

    # A pattern. The user has not typed the names that it matches, so none of them may lead out of its folder.
    matches = sorted(Path(name) for name in glob.glob(str(place), recursive=True))
    folder = _folder_of_pattern(place)
    for match in matches:
        require_in_folder(match, folder)
    files = [match for match in matches if match.is_file()]
    if not files:
        raise DataError(f"{path} matches no file")
    return tuple(_known(file) for file in files)


def read_source(source: SourceConfig, problems: Problems) -> Iterator[Record]:
    """Yield all records of a source, in order. Anything that is no record becomes a problem, and reading continues."""
    located = locate(source)
    for file in located.files:
        yield from read_file(file, problems)
    if not located.files:
        dataset = load_dataset(located.path, source.subset, source.split)
        for number, value in enumerate(_undecoded(dataset), 1):
            yield Record(located.path, number, as_json(value))


def _undecoded(dataset: Dataset) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data set, its images as the path or the bytes that it has, not as pixels."""
    # Also of images within lists and objects, whose features are nested likewise.
    if "'_type': 'Image'" not in str(dataset.features.to_dict()):
        yield from dataset
        return
    for batch in dataset.with_format("arrow").iter(batch_size=100):
        yield from batch.to_pylist()


def count_rows(source: SourceConfig) -> int:
    """Return the number of records of a source, bad ones too, without parsing them where the format allows that."""
    located = locate(source)
    if not located.files:
        return len(load_dataset(located.path, source.subset, source.split))
    return sum(count_records(file) for file in located.files)


def names_of(sources: Sequence[SourceConfig]) -> tuple[str, ...]:
    """Return a name for each source: as much of the end of its path as tells it from the others.

    `data/maths/train.jsonl` and `data/poems/train.jsonl` are called `maths/train.jsonl` and `poems/train.jsonl`. Signs
    that not all trackers take become `_`.
    """
    paths = []
    for source in sources:
        path = without_sample(source.path)
        paths.append(PurePath(path, source.subset or "", source.split.replace("train", "")))

    names: list[str] = []
    longest = max((len(path.parts) for path in paths), default=0)
    for depth in range(1, longest + 1):
        names = [_name(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return tuple(names)

    # The same path twice.
    return tuple(f"{name} {number}" for number, name in enumerate(names, 1))


def _name(parts: Sequence[str]) -> str:
    return re.sub(r"[^\w./ -]", "_", PurePath(*parts).as_posix().lstrip("/"))


def input_digests(source: SourceConfig) -> list[str]:
    """Return the SHA-256 of every file a source reads, in order; of a hub data set, of its files in the cache."""
    located = locate(source)
    if located.files:
        return [sha256_file(file) for file in located.files]
    cached = load_dataset(located.path, source.subset, source.split).cache_files
    return [sha256_file(file["filename"]) for file in cached]


def class_names(source: SourceConfig) -> tuple[str, ...]:
    """Return the names that a data set has for the numbers in its column of labels; none where it does not say.

    Data sets of the hub say so in their features, and Parquet files that `datasets` wrote in their schema. Raises
    DataError where two files of a source have different names.
    """
    located = locate(source)
    if not located.files:
        features = load_dataset(located.path, source.subset, source.split).features.to_dict()
        return _names_of_classes(features, source)

    first: tuple[str, ...] = ()
    first_file = None
    for file in located.files:
        names = _names_of_classes(features_of(file), source)
        if names and first and names != first:
            # Each file alone would be read well; together, a number would be one class here and another there.
            raise DataError(
                f"{file} numbers its classes {', '.join(names[:12])}, but {first_file} {', '.join(first[:12])}: one "
                "number would mean two classes. Give all the same names in the same order. Nothing was written."
            )

        if names and not first:
            first = names
            first_file = file

    return first


def _names_of_classes(features: Mapping[Any, Any], source: SourceConfig) -> tuple[str, ...]:
    """Return the names of classes that the features of a data set have in its column of labels."""
    kind: Any = {}
    for key in (source.columns.get("label"), "label", "labels"):
        if key in features:
            kind = features[key]
            break

    # A list of labels has the account of one label inside: [kind], or {"feature": kind}.
    while isinstance(kind, list) or (isinstance(kind, dict) and "feature" in kind):
        kind = kind[0] if isinstance(kind, list) else kind["feature"]
    if not isinstance(kind, dict):
        return ()
    return tuple(kind.get("names") or ())


@lru_cache(maxsize=8)
def load_dataset(
    path: str,
    subset: str | None,
    split: str,
) -> Dataset:
    """Return a data set of the hub, or one saved to a folder by `datasets`, with that optional library."""
    require(f"{path}, a Hugging Face data set,", "datasets")
    import datasets

    if Path(os.path.expanduser(path)).is_dir():
        return _load_saved(path, subset, split)
    with explained_hub_errors(path, kind="dataset"), _known_to_be_away():
        try:
            return datasets.load_dataset(
                path,
                subset,
                split=split,
                token=hub_token(),
            )
        except (datasets.exceptions.DatasetNotFoundError, ValueError) as error:
            advice = "" if subset else "; which part of a data set is meant is said by `subset`"
            raise DataError(
                f"data set {path} (subset {subset}, split {split}): {error}{advice}"
            ) from error
        except Exception as error:
            explained = _unreadable(error, f"data set {path} (subset {subset}, split {split})")
            if explained is None:
                raise
            raise explained from error


@contextmanager
def _known_to_be_away() -> Iterator[None]:
    """Have `datasets` look only into its cache, at once, while the hub's name cannot be resolved."""
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    if unresolved_host():
        datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _load_saved(
    path: str,
    subset: str | None,
    split: str,
) -> Dataset:
    """Return a split of a data set that `datasets` saved to a folder."""
    import datasets

    folder = Path(os.path.expanduser(path))
    _require_saved_inside(folder)
    saved: Any = datasets.load_from_disk(str(folder))
    splits = saved
    if isinstance(saved, datasets.Dataset):
        # Saved without its splits: it is the split that it says, and `train`, which is the default.
        splits = {"train": saved, str(saved.split or "train"): saved}
    if subset or split not in splits:
        asked = f"subset {subset!r}" if subset else f"split {split!r}"
        raise DataError(f"{path} has no {asked}; it has the splits {', '.join(splits)}. {_PART}")
    return splits[split]


def _unreadable(error: Exception, what: str) -> KubetuneError | None:
    """Return the error where `datasets` can make no rows of files that are here; None if the hub is to blame."""
    chain = list(causes(error, hidden=True))
    for cause in chain:
        fault = fault_of(cause)
        if fault is not None:
            return fault

    # pyarrow reads files that are here already.
    is_of_arrow = any(type(cause).__module__ == "pyarrow.lib" for cause in chain)
    if is_of_hub(error) and not is_of_arrow:
        return None

    # The last error of the chain that says anything is the nearest to what went wrong.
    reason = "they have none"
    for cause in causes(error):
        reason = " ".join(str(cause).split())[:500] or reason
    return DataError(
        f"{what}: no rows can be made of its files ({reason}). Give some of them by their paths instead"
    )


def require_sources(splits: Mapping[Any, Sequence[SourceConfig]]) -> None:
    """Raise DataError where a file of a run's data is missing, before anything that takes time is asked for."""
    for sources in splits.values():
        for source in sources:
            locate(source)


def require_hub_data(
    splits: Mapping[Any, Sequence[SourceConfig]], environ: Mapping[str, str]
) -> None:
    """Raise DataError for data sets of the hub that are neither on this machine nor to be had from there."""
    of_hub = set()
    for sources in splits.values():
        for source in sources:
            try:
                located = locate(source)
            except DataError:
                continue  # whoever reads it says so
            if not located.files and not Path(os.path.expanduser(located.path)).is_dir():
                of_hub.add(located.path)

    problems = []
    for path in sorted(of_hub):
        require(f"{path}, a Hugging Face data set,", "datasets")
        try:
            require_dataset(path, environ)
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError(problems)


def no_records(key: str, sources: Sequence[SourceConfig]) -> DataError:
    """Return the error for sources in which there is no record: why none can be read, if there is a reason.

    `key`: where they are named.
    """
    problems = Problems()
    for source in sources:
        for _ in read_source(source, problems):
            break
    if problems.total:
        return problems.error()
    paths = ", ".join(source.path for source in sources)
    where = f": {paths}" if paths else ""
    return DataError(f"{key}{where} holds no records. Nothing was written.")


def _broken_link(place: Path) -> str:
    try:
        place.stat()
    except OSError as error:
        # a -> b -> a
        if error.errno == errno.ELOOP:
            return "and following it leads in a circle"
    return "which does not exist"


def _is_saved_dataset(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def not_read(sources: Iterable[SourceConfig], *, images: bool = False) -> Counter[str]:
    """Count by ending the files in the folders of sources that hold none of their records.

    With `images`, files of images are not counted: records name them.
    """
    left: Counter[str] = Counter()
    for located in map(locate, sources):
        for file in located.others:
            is_hidden = file.name.startswith(".")
            is_image = file.suffix.lower() in IMAGE_SUFFIXES
            if file.is_file() and not (images and is_image and not is_hidden):
                kind = file.suffix or file.name
                left[f"hidden {kind}" if is_hidden else kind] += 1
    return left


def visible_in(folder: Path) -> list[Path]:
    """Return what a folder of data holds, at any depth, in the order of names, without what is hidden in it.

    Copies that were not finished are hidden too: `.a.png.1a2b.tmp`.
    """
    visible, _ = _entries_in(folder)
    return visible


def _entries_in(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return what is visible in a folder, at any depth, and what is hidden in it or in a visible folder below."""
    visible = []
    hidden = []
    for entry in sorted(folder.rglob("*")):
        *above, name = entry.relative_to(folder).parts
        # What lies in hidden folders is a program's own.
        if any(part.startswith(".") for part in above):
            continue
        if name.startswith("."):
            hidden.append(entry)
        else:
            visible.append(entry)
    return visible, hidden


def _is_data(file: Path) -> bool:
    """True for a hidden file that would be records or an image if it were not hidden, or finished; not `.gitattributes`."""
    is_known = is_read(file) or file.suffix.lower() in (*IMAGE_SUFFIXES, ".tmp")
    return is_known and file.is_file()


def _files_in(folder: Path) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Return the files of a folder that hold records, and all else in it. Raise DataError if none holds any."""
    entries, hidden = _entries_in(folder)
    for entry in entries:
        reason = _why_not_read(entry)
        if reason:
            raise DataError(
                f"{entry} {reason}, or move it out of {folder}: what it holds is not read"
            )
        require_in_folder(entry, folder)

    readable = []
    for entry in entries:
        if is_read(entry) and entry.is_file() and entry.name not in _ABOUT_DATA:
            readable.append(entry)
    # Beside records, plain texts are licences and notes.
    records = [file for file in readable if ending_of(file) != ".txt"] or readable
    if not records:
        raise DataError(
            f"{folder} holds no data; expected files of {readable_endings()}, or a data set saved by `datasets`"
        )

    others = {*entries, *filter(_is_data, hidden)}.difference(records)
    return tuple(records), tuple(sorted(others))


def _folder_of_pattern(pattern: Path) -> Path:
    """Return the folder that a pattern names before its first wildcard, which the user has typed."""
    folder = pattern.parent
    while glob.has_magic(str(folder)):
        folder = folder.parent
    return folder


def require_in_folder(file: Path, folder: Path) -> None:
    """Raise DataError for what lies in a folder of data and is no file or folder inside it."""
    try:
        require_inside(file, folder)
        require_plain_entry(file, folder)
    except IrregularFileError as error:
        raise DataError(
            f"{error}, or name it as a source of its own. Nothing was written."
        ) from None


def _require_saved_inside(folder: Path) -> None:
    """Raise DataError where a data set saved by `datasets` would have files read that lie outside its folder."""
    try:
        require_plain(folder)
    except IrregularFileError as error:
        raise DataError(f"data set {error}. Nothing was written.") from None

    # Its own JSON files name others, which `datasets` opens wherever they lie.
    for file in sorted((*folder.rglob("dataset_dict.json"), *folder.rglob("state.json"))):
        for name in _names_in(read_object(file, folder)):
            try:
                require_inside(file.parent / name, folder)
            except IrregularFileError:
                raise DataError(
                    f"data set {folder}: {file.relative_to(folder)} names {name!r}; expected names of what lies in the "
                    "folder. Nothing was written."
                ) from None


def _names_in(facts: Mapping[str, Any]) -> list[str]:
    """Return the files and folders that a file of a saved data set names."""
    names = []
    # dataset_dict.json names folders, state.json files.
    splits = facts.get("splits")
    if isinstance(splits, list):
        names += splits
    data_files = facts.get("_data_files")
    if isinstance(data_files, list):
        names += [entry.get("filename") for entry in data_files if isinstance(entry, dict)]
    # The files are of unknown origin, so anything may be in them.
    return [name for name in names if isinstance(name, str)]


def _why_not_read(file: Path) -> str:
    """Return why something in a folder of data is not read though it may hold records; empty for most entries."""
    if is_packed_otherwise(file) and is_read(file.stem):
        return "is packed; unpack it"
    if holds_other_records(file):
        return f"is of an unknown kind; make one of {readable_endings()} of it"
    if file.is_symlink() and (file.is_dir() or (is_read(file) and not file.exists())):
        why = "a folder; name it as a source" if file.is_dir() else _broken_link(file)
        return f"is a link to {os.readlink(file)}, {why}"
    return ""


def _known(file: Path) -> Path:
    if not is_read(file) and not is_packed_otherwise(file):
        raise DataError(f"{file} is of an unknown kind; expected {readable_endings()}")
    return file


def empty_range(source: SourceConfig, available: int) -> DataError:
    """Return the error for a range that begins after the records that there are."""
    first, end = source.range or (0, available)
    return DataError(f"{source.path}: range [{first}, {end}) takes no record of {available:,}")
