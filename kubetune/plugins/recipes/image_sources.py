"""Sources of the images of a conversion, as `--images` says: folders here, data sets of the hub, or nowhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kubetune.data.reading.images import ImageFacts, ImageFolders, UnusableImage, verifier
from kubetune.errors import ConfigError, DataError
from kubetune.plugins.recipes.origin import HUB, NOTHING

COCO: Final = "detection-datasets/coco"
"""Meaning of a bare `hub`: COCO 2017 on the hub, whose rows have an `image_id`, the number in COCO's file names."""

FETCHED: Final = "images"
"""Folder of the output that images of the hub are saved in, under the paths that the records give them."""


@dataclass(frozen=True)
class ImageSources:
    """`folders` are looked into; `hub` says for a source set (`""`: all) which data set of the hub has its images.

    With `skip` nothing is looked for, and rows name the images as the records do.
    """

    folders: ImageFolders
    hub: Mapping[str, str] = field(default_factory=dict)
    skip: bool = False

    @classmethod
    def parse(cls, words: Sequence[str], *, skip: bool) -> ImageSources:
        """From DIR, SET=DIR, hub, hub:ID or SET=hub:ID. Raises ConfigError or DataError."""
        root: Path | None = None
        prefixes: dict[str, Path] = {}
        hub: dict[str, str] = {}
        for word in words:
            prefix, sign, place = word.rpartition("=")
            if place == "hub":
                hub[prefix or "coco"] = COCO
            elif place.startswith(HUB):
                hub[prefix] = place.removeprefix(HUB)
            elif not Path(place).expanduser().is_dir():
                raise DataError(f"--images {word}: there is no folder {place}. {NOTHING}")
            elif sign:
                prefixes[prefix] = Path(place).expanduser().resolve()
            elif root is not None:
                raise ConfigError(
                    f"--images {root} and {place}; expected one folder that has no SET=. {NOTHING}"
                )
            else:
                root = Path(place).expanduser().resolve()
        if not words and not skip:
            raise ConfigError(
                f"--images is missing; expected a folder, hub, or --skip-images. {NOTHING}"
            )
        if skip and hub:
            raise ConfigError(f"--skip-images and --images hub exclude each other. {NOTHING}")
        return cls(ImageFolders(root, prefixes), hub, skip)

    def data_set(self, path: str) -> str | None:
        """The data set of the hub that has the image of this path; None for images in folders."""
        prefix = path.partition("/")[0]
        return None if prefix in self.folders.prefixes else self.hub.get(prefix, self.hub.get(""))

    def facts(self) -> dict[str, Any]:
        """Settings that decide the paths in the rows."""
        prefixes = {prefix: str(folder) for prefix, folder in self.folders.prefixes.items()}
        return {
            "root": str(self.folders.root),
            "prefixes": prefixes,
            "hub": dict(self.hub),
            "skip": self.skip,
        }

    def finder(self, output: Path) -> Callable[[str], str]:
        """A function from the path in a record to the path in a row. It raises UnusableImage.

        An image in a folder is decoded once and stays where it is; the row has its absolute path. Images of the hub
        lie in `output` already, whole, and rows name them relative to it.
        """
        if self.skip:
            return self._as_given
        verify = verifier()
        return lambda path: self._found(path, output, verify)

    def _as_given(self, path: str) -> str:
        is_text = path.encode("utf-8", "replace").decode() == path  # no half of a surrogate pair
        if (
            path.startswith("/")
            or "://" in path
            or "\0" in path
            or ".." in path.split("/")
            or not is_text
        ):
            raise UnusableImage(
                "image_outside", f"path {path!r} must be relative, and lead nowhere outside"
            )
        return str(self.folders.root / path) if self.folders.root else path

    def _found(self, path: str, output: Path, verify: Callable[[Path], ImageFacts]) -> str:
        if (data_set := self.data_set(path)) is not None:
            try:
                ImageFolders(output / FETCHED, {}).find(path)
            except UnusableImage as error:
                told = f"image {path!r} is not in {data_set}, or cannot be used"
                raise UnusableImage(error.reason, told) from error
            return f"{FETCHED}/{path}"
        file = self.folders.find(path)
        verify(file)
        return str(file)
