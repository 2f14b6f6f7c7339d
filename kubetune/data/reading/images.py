"""Finding images that data name, and looking whether they can be used: format, size, whole to the last byte.

Nothing is changed or kept here. Paths in data are not trusted: they cannot lead out of the folders they are looked for
in, and no file is decoded before its header says that it is of a sane size. What a row of the right shape is, is
formats.py's; where tags go, too.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from kubetune.base.files import explained_writes, join_inside, write_atomic

FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""Formats that are opened at all; Pillow's parsers of rarer formats stay out of reach of data."""
IMAGE_SUFFIXES: Final = (".jpg", *(f".{name.lower()}" for name in FORMATS))
"""Suffixes of their files."""

MAX_BYTES: Final = 50 * 2**20
MAX_PIXELS: Final = 2**26
"""64 megapixels: 192 MiB when decoded. A small file that claims more is a decompression bomb or useless."""

MAX_ASPECT_RATIO: Final = 200
"""Longer side by shorter side; the image processors of Qwen-VL refuse more."""


class UnusableImage(ValueError):
    """An image that cannot be had. `reason` is one of a few words to count by; the message says what was found."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """Facts of a whole image: `format` as Pillow names it, width and height in pixels, size of the file in bytes.

    `is_animated`: there are frames behind the first, which nothing here looks at; `is_deep`: it has more than 8 bits of
    grey, and what 8 bits cannot hold becomes white.
    """

    format: str
    width: int
    height: int
    bytes: int
    is_animated: bool = False
    is_deep: bool = False


def image_of_row(data_file: str, path: str) -> Path:
    """The file that a row of `data_file` means by `path`: absolute, or relative to the folder of the data file."""
    return Path(path) if Path(path).is_absolute() else Path(data_file).parent / path


def image_file(data_file: str, image: str, cache: Path) -> Path:
    """The file of an image that a row of `data_file` names, or holds.

    One that it holds, as an address of data, is kept in the `cache`, by its content. Raises UnusableImage where it is
    no such address.
    """
    if not image.startswith(ADDRESS):
        return image_of_row(data_file, image)
    return _kept(_content(image), cache / "images")


ADDRESS: Final = "data:"
"""Beginning of addresses that hold the data themselves."""

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_BASE64: Final = re.compile(r"data:(?:image/[\w.+-]+)?;base64,")


def data_address(content: bytes, kind: str = "") -> str:
    """The bytes of an image as an address of data (RFC 2397)."""
    return f"{ADDRESS}{kind};base64,{b64encode(content).decode()}"


def _content(address: str) -> bytes:
    if (start := _BASE64.match(address)) is None:
        raise UnusableImage(
            "image_unknown", f"image {address[:40]!r}… begins with no `data:image/…;base64,`"
        )
    try:
        return b64decode(address[start.end() :], validate=True)
    except ValueError as error:
        raise UnusableImage(
            "image_damaged", f"image {address[:40]!r}… is not base64: {error}"
        ) from error


def _kept(content: bytes, folder: Path) -> Path:
    name = hashlib.sha256(content).hexdigest()
    file = folder / name[:2] / name
    if not (file.is_file() and file.stat().st_size == len(content)):
        with explained_writes(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, content)
    return file


@dataclass(frozen=True)
class ImageFolders:
    """A folder of a data set's images, which holds them by path.

    `coco/train2017/1.jpg` is `root/coco/train2017/1.jpg`, and where `root` is itself called coco,
    `root/train2017/1.jpg`. A path without its source set (`images/1.jpg`) may lie in any one folder of the root, but
    only in one.
    """

    root: Path

    def find(self, path: str) -> Path:
        """The file of a path. Raises UnusableImage: `image_outside`, `image_missing` or `image_ambiguous`."""
        parts = path.split("/")
        try:
            candidates = self._exact(parts)
            for candidate in candidates:
                if candidate.is_file():
                    return candidate
            found = self._below_one_folder(path)
        except OSError as error:  # a name too long for the file system
            raise UnusableImage(
                "image_missing", f"image {path[:100]!r} cannot be looked for: {error}"
            ) from error
        except ValueError as error:
            raise UnusableImage("image_outside", str(error)) from error
        if len(found) > 1:
            raise UnusableImage(
                "image_ambiguous", f"image {path!r} is in {found[0].parent} and {found[1].parent}"
            )
        if not found:
            looked = " nor ".join(map(str, candidates))
            raise UnusableImage("image_missing", f"image {path!r} is not at {looked}")
        return found[0]

    def _exact(self, parts: list[str]) -> list[Path]:
        # From 1 on: --images /data/coco, or /data/coco/train2017
        depths = (
            depth
            for depth in range(len(parts))
            if list(self.root.parts[-depth:]) == parts[:depth] or not depth
        )
        return [join_inside(self.root, "/".join(parts[depth:])) for depth in depths]

    def _below_one_folder(self, path: str) -> list[Path]:
        joined = (join_inside(folder, path) for folder in _folders_in(self.root))
        return [candidate for candidate in joined if candidate.is_file()]


@lru_cache(maxsize=4)
def _folders_in(root: Path) -> tuple[Path, ...]:
    return tuple(sorted(entry for entry in root.iterdir() if entry.is_dir()))


def _told(file: Path) -> str:
    """A file as messages name it: of one that a record held, the cache's name for it would tell nothing."""
    is_kept = _DIGEST.fullmatch(file.name) is not None and file.parent.name == file.name[:2]
    return "in the record itself" if is_kept else str(file)


def verify_image(file: Path) -> ImageFacts:
    """Look whether an image file can be used, by decoding it. Raises UnusableImage with the reason.

    JPEGs are decoded at an eighth of their size, which reads every byte of them in a fraction of the time.
    """
    try:
        number = file.stat().st_size
    except OSError as error:
        raise UnusableImage(
            "image_missing", f"image {_told(file)} cannot be read: {error.strerror}"
        ) from error
    if not number:
        raise UnusableImage("image_damaged", f"image {_told(file)} is empty")
    if number > MAX_BYTES:
        raise UnusableImage(
            "image_too_large",
            f"image {_told(file)} has {number:,} bytes; at most {MAX_BYTES:,} are read",
        )
    return _decode(file, number)


def _decode(file: Path, number: int) -> ImageFacts:
    image_module = pillow()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # Pillow warns of sizes, which are looked at below, and of odd metadata
        try:
            with image_module.open(file, formats=FORMATS) as image:
                facts = ImageFacts(str(image.format), image.width, image.height, number)
                _require_sane_size(file, facts)
                image.draft("RGB", (max(1, image.width // 8), max(1, image.height // 8)))
                image.load()
                is_deep = image.mode[0] in "IF"
                facts = replace(
                    facts, is_deep=is_deep, is_animated=getattr(image, "is_animated", False)
                )
        except UnusableImage:
            raise
        except image_module.DecompressionBombError as error:
            raise UnusableImage("image_too_large", f"image {_told(file)}: {error}") from error
        except image_module.UnidentifiedImageError as error:
            raise UnusableImage(
                "image_unknown", f"image {_told(file)} is no image of {', '.join(FORMATS)}"
            ) from error
        except Exception as error:  # Pillow's parsers raise many kinds; each means that the bytes are no sound image
            raise UnusableImage(
                "image_damaged", f"image {_told(file)} cannot be decoded: {error}"
            ) from error
    return facts


def _require_sane_size(file: Path, facts: ImageFacts) -> None:
    size = f"{facts.width:,} × {facts.height:,} pixels"
    if facts.width * facts.height > MAX_PIXELS:
        raise UnusableImage(
            "image_too_large", f"image {_told(file)} has {size}; at most {MAX_PIXELS:,} are decoded"
        )
    if max(facts.width, facts.height) > MAX_ASPECT_RATIO * max(1, min(facts.width, facts.height)):
        raise UnusableImage(
            "image_too_narrow",
            f"image {_told(file)} has {size}; at most {MAX_ASPECT_RATIO} to 1 can be used",
        )


def thumbnail(file: str | Path, longest: int = 200) -> str:
    """A small copy of an image that `verify_image` has found good, as an address of data for a page."""
    from PIL import ImageOps

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pillow().open(file, formats=FORMATS) as image:
            image.draft("RGB", (longest, longest))
            small = ImageOps.exif_transpose(image).convert("RGB")
    small.thumbnail((longest, longest))
    content = BytesIO()
    small.save(content, "JPEG", quality=80)
    return data_address(content.getvalue(), "image/jpeg")


@lru_cache(maxsize=1)
def pillow() -> Any:
    """Pillow's `Image` module. Raises MissingExtra, saying how to get it, where it is missing."""
    from kubetune.extras import require

    require("to read images", "PIL")
    from PIL import Image

    return Image


def verifier() -> Callable[[Path], ImageFacts]:
    """`verify_image` that remembers the last images: neighbouring records often share one."""
    return lru_cache(maxsize=4096)(verify_image)
