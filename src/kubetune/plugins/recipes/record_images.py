"""Images of a conversion, where `--images` says: in a folder here, in COCO on the hub, or not looked for.

None is decoded here: `data check` and `data prepare` do that, and name each that cannot be used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kubetune.data.reading.images import ImageFolders, UnusableImage
from kubetune.data.reading.readers import read_file
from kubetune.data.reading.record_problems import Problems
from kubetune.errors import DataError
from kubetune.plugins.recipes.dataset_files import fetched

# What `--images hub` means: COCO 2017, whose rows have `image` and `image_id`, the number in COCO's file names.
COCO: Final = "detection-datasets/coco"
# Folder of the output that images of the hub are saved in, under the paths that the records give them.
SAVED: Final = "images"


@dataclass(frozen=True)
class Images:
    """Where images are: in a folder, saved in the output, or, with neither, wherever the records say."""

    folder: Path | None = None
    saved: Set[str] | None = None  # paths of records, beneath SAVED of the output

    def find(self, path: str) -> str:
        """Return the path of an image for a row. Raise UnusableImage where there is no such image."""
        if self.folder is not None:
            return str(ImageFolders(self.folder).find(path))
        if self.saved is None:
            return path
        if path not in self.saved:
            raise UnusableImage("image_missing", f"image {path!r} is not in {COCO}")
        return f"{SAVED}/{path}"


def image_folder(place: str | None) -> Path | None:
    """Return the folder that `--images` names, None without one. Raise DataError where it is not there."""
    if place is None or place == "hub":
        return None
    folder = Path(place).expanduser()
    if not folder.is_dir():
        raise DataError(
            f"--images: there is no folder {place}; expected one, or `hub`. Nothing was written."
        )
    return folder.resolve()


def save_coco(paths: Set[str], output: Path, progress: Callable[[str, int], None]) -> set[str]:
    """Save the images of COCO that paths name beneath `output`, byte for byte; return those paths."""
    # Several paths may mean one image: coco/train2017/000000000009.jpg and coco/000000000009.jpg.
    wanted: dict[int, list[str]] = {}
    for path in sorted(paths):
        # Other data sets number their images too: vg/9.jpg is another picture.
        name = re.fullmatch(r"coco/(?:\w+/)?([0-9]+)\.\w+", path)
        if name is not None:
            wanted.setdefault(int(name[1]), []).append(path)
    if not wanted:
        return set()

    saved: set[str] = set()
    for file in sorted(fetched(COCO, ["*.parquet"]).rglob("*.parquet")):
        problems = Problems()
        for record in read_file(file, problems):
            row = record.value
            if not {"image", "image_id"} <= row.keys():
                raise DataError(f"{file} of {COCO} lacks `image` or `image_id`; has {list(row)}")
            for path in wanted.get(row["image_id"], ()):
                place = output / SAVED / path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(row["image"]["bytes"])
                saved.add(path)
        problems.raise_if_any()
        progress(f"images of {COCO}", len(saved))
    return saved
