"""Images out of data sets of the hub, streamed: only those that are needed are kept, as the bytes they have there.

COCO on the hub is some hundred thousand rows of which a data set needs a part, so the stream is read until all are
found. What was saved and how far the stream was read survives a kill.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from kubetune.base import fault_injection
from kubetune.base.files import join_inside, read_object, temporary_sibling, write_atomic
from kubetune.data.reading.hub import hub_token
from kubetune.data.reading.images import UnusableImage, verify_image
from kubetune.errors import DataError
from kubetune.extras import require
from kubetune.plugins.recipes.image_sources import FETCHED, ImageSources
from kubetune.plugins.recipes.origin import asking_hub

SAVE_EVERY: Final = 1000
_NAMES: Final = ("file_name", "filename", "image_path", "path", "image_id", "id")
"""Columns that tell which image a row has, the best first."""


def fetch_images(
    needed: Mapping[str, set[str]],
    sources: ImageSources,
    work: Path,
    progress: Callable[[str, int, int], None],
) -> dict[str, int]:
    """Save the images of all splits beneath `work/images`; returns how many each split has.

    An image that the data set lacks, or that cannot be used, is left out; its records will tell.
    """
    folder = work / FETCHED
    folder.mkdir(exist_ok=True)
    everything = sorted(set().union(*needed.values()))
    wanted: dict[str, list[str]] = {}
    for path in everything:
        wanted.setdefault(str(sources.data_set(path)), []).append(path)
    for data_set, paths in wanted.items():
        _fetch(data_set, paths, folder, work / ".progress", progress)
    return {
        split: sum((folder / path).is_file() for path in paths) for split, paths in needed.items()
    }


def _fetch(
    data_set: str,
    paths: list[str],
    folder: Path,
    notes: Path,
    progress: Callable[[str, int, int], None],
) -> None:
    places: dict[str, list[Path]] = {}
    for path in paths:
        try:
            place = join_inside(folder, path)
        except ValueError:
            continue  # the record is skipped for it
        if not place.is_file():
            places.setdefault(_key(path), []).append(place)
    total, left = len(paths), sum(map(len, places.values()))
    label = f"images of {data_set}"
    progress(label, total, total - left)
    if not places:
        return
    for image in _stream(data_set, notes, _splits_first(paths)):
        for place in places.pop(_key(image.name), []):
            _save(image.content, place)
            left -= 1
            progress(label, total, total - left)
        if not places:
            return


def _key(name: str) -> str:
    """Key that a record's path and a row of the hub agree on: the file's name, or COCO's number without its zeros."""
    stem = Path(name).stem
    return str(int(stem)) if stem.isdecimal() else Path(name).name


def _splits_first(paths: Iterable[str]) -> tuple[str, ...]:
    """`train` and `val` in the order in which most paths name them: coco/train2017/…"""
    counts = {
        split: sum(f"/{split}" in path for path in paths) for split in ("train", "val", "test")
    }
    return tuple(sorted(counts, key=lambda split: -counts[split]))


def _save(content: bytes, place: Path) -> None:
    """Write an image as it is, if it can be used; whole or not at all."""
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_sibling(place)
    try:
        temporary.write_bytes(content)
        verify_image(temporary)
        os.replace(temporary, place)
        fault_injection.reach("convert.image")
    except UnusableImage:
        temporary.unlink()


class HubImage(NamedTuple):
    """One image of the stream: its name or number, and the bytes of its file."""

    name: str
    content: bytes


def _stream(data_set: str, notes: Path, first: tuple[str, ...]) -> Iterator[HubImage]:
    """All images of a data set, split by split, from where the last stream was when it was stopped."""
    require("images of the hub", "datasets")
    import datasets

    note = notes / f"{data_set.replace('/', '--').strip('-')}.json"
    stopped = read_object(note) if note.exists() else {"split": None, "state": None, "passed": []}
    with asking_hub(data_set):
        splits = datasets.get_dataset_split_names(data_set, token=hub_token())
        order = sorted(
            splits, key=lambda split: first.index(split) if split in first else len(first)
        )
        for split in order:
            if split in stopped["passed"]:
                continue
            stream: Any = datasets.load_dataset(
                data_set, split=split, streaming=True, token=hub_token()
            )
            stream, image, name = _columns(data_set, stream)
            if split == stopped["split"]:
                stream.load_state_dict(stopped["state"])
            for number, row in enumerate(stream, 1):
                content, path = row[image]["bytes"], row[image]["path"]
                yield HubImage(str(row[name] if name else path), content)
                if number % SAVE_EVERY == 0:
                    write_atomic(
                        note, json.dumps(stopped | {"split": split, "state": stream.state_dict()})
                    )
            stopped["passed"].append(split)
            write_atomic(note, json.dumps(stopped | {"split": None, "state": None}))


def _columns(data_set: str, stream: Any) -> tuple[Any, str, str | None]:
    """The stream with its images undecoded, and the names of the columns of the image and of what it is called."""
    import datasets

    features = stream.features or stream._resolve_features().features
    image = next((key for key, kind in features.items() if isinstance(kind, datasets.Image)), None)
    if image is None:
        raise DataError(
            f"data set {data_set} has no column of images; it has {', '.join(features)}"
        )
    name = next((key for key in _NAMES if key in features), None)
    stream = stream.select_columns([image, *([name] if name else [])])
    return stream.cast_column(image, datasets.Image(decode=False)), image, name
