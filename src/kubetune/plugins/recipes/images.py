"""Images of a conversion, where `--images` says: in a folder here, in a data set of the hub, or not looked for.

COCO on the hub is some hundred thousand rows in Parquet files, of which a data set needs a part. The files are fetched
one by one into the hub's cache until all images are there, so a conversion that is begun anew fetches none of them twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kubetune.base.files import join_inside
from kubetune.data.reading.images import ImageFolders, UnusableImage, verifier, verify_image
from kubetune.data.reading.problems import Problems
from kubetune.data.reading.readers import read_file
from kubetune.errors import DataError
from kubetune.plugins.recipes.files import HUB, fetched, hub_files

# What a bare `hub` means: COCO 2017, whose rows have an `image_id`, the number in COCO's file names.
COCO: Final = "detection-datasets/coco"
# Folder of the output that images of the hub are saved in, under the paths that the records give them.
SAVED: Final = "images"
# Columns that tell which image a row has, the best first.
_NAMES: Final = ("file_name", "filename", "image_path", "path", "image_id", "id")


@dataclass(frozen=True)
class ImageSource:
    """Where images are: in a folder, in a data set of the hub, or, with neither, wherever the records say."""

    folder: Path | None = None
    data_set: str | None = None

    @classmethod
    def parse(cls, place: str | None) -> ImageSource:
        """Read DIR, hub or hub:ID; None does not look for images. Raise DataError where there is no such folder."""
        if place is None:
            return cls()
        if place == "hub":
            return cls(data_set=COCO)
        if place.startswith(HUB):
            return cls(data_set=place.removeprefix(HUB))
        folder = Path(place).expanduser()
        if not folder.is_dir():
            raise DataError(f"--images: there is no folder {place}. Nothing was written.")
        return cls(folder=folder.resolve())

    def finder(self, saved: Set[str]) -> Callable[[str], str]:
        """Return a function from the path of a record to that of its row. It raises UnusableImage.

        An image in a folder is decoded once and stays where it is; the row has its absolute path. Images of the hub
        were `saved` in the output already, and rows name them relative to it.
        """
        if self.folder is not None:
            folders = ImageFolders(self.folder)
            verify = verifier()

            def find(path: str) -> str:
                file = folders.find(path)
                verify(file)
                return str(file)

            return find

        def find_unseen(path: str) -> str:
            if path.startswith("/") or "://" in path or ".." in path.split("/"):
                message = f"path {path!r} must be relative, and lead nowhere outside"
                raise UnusableImage("image_outside", message)
            if self.data_set is None:
                return path
            if path not in saved:
                message = f"image {path!r} is not in {self.data_set}, or cannot be used"
                raise UnusableImage("image_missing", message)
            return f"{SAVED}/{path}"

        return find_unseen


def save_images(
    paths: Set[str], data_set: str, output: Path, progress: Callable[[str, int], None]
) -> set[str]:
    """Save images of a data set of the hub beneath `output`, and return the paths of those that it has."""
    # Several paths may mean one image: coco/train2017/000000000009.jpg and 000000000009.png.
    wanted: dict[str, list[str]] = {}
    for path in sorted(paths):
        wanted.setdefault(_key(path), []).append(path)
    saved: set[str] = set()
    for name, content in _images_of(data_set, paths):
        for path in wanted.pop(_key(name), []):
            # Records of other paths will be skipped, and tell why.
            with contextlib.suppress(UnusableImage, ValueError):
                _save(content, join_inside(output / SAVED, path))
                saved.add(path)
        progress(f"images of {data_set}", len(saved))
        if not wanted:
            break
    return saved


def _key(name: str) -> str:
    """Return what a path and a row of the hub agree on: the file's name, or COCO's number without its zeros."""
    stem = Path(name).stem
    if stem.isdecimal():
        return str(int(stem))
    return Path(name).name


def _images_of(data_set: str, paths: Set[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the name or number of each image of a data set of the hub, and the bytes of its file."""
    files = _likely_first(hub_files(data_set), paths)
    if not files:
        raise DataError(f"data set {data_set} has no Parquet files. Nothing was written.")
    for file in files:
        problems = Problems()
        for record in read_file(fetched(data_set, file), problems):
            row = record.value
            image = _first_image(row)
            if image is None:
                columns = ", ".join(row)
                raise DataError(f"data set {data_set} has no column of images; it has {columns}")
            name = image.get("path")
            for column in _NAMES:
                if column in row:
                    name = row[column]
                    break
            yield str(name), image["bytes"]
        problems.raise_if_any()


def _first_image(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the first image of a row, as `datasets` writes one: {"path": "1.jpg", "bytes": …}."""
    for value in row.values():
        if isinstance(value, dict) and "bytes" in value:
            return value
    return None


def _likely_first(files: Sequence[str], paths: Set[str]) -> list[str]:
    """Return Parquet files, those of the split that most paths name first: coco/train2017/… names train."""

    def number_of_paths(file: str) -> int:
        split = Path(file).name.partition("-")[0]
        return sum(f"/{split}" in path for path in paths)

    parquet = [file for file in files if file.endswith(".parquet")]
    return sorted(parquet, key=number_of_paths, reverse=True)


def _save(content: bytes, place: Path) -> None:
    """Write an image as it is. Raise UnusableImage where it cannot be used."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(content)
    try:
        verify_image(place)
    except UnusableImage:
        place.unlink()
        raise
